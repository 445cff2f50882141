"""Short runs of the reward model's loop, and what they leave in their directory."""

import json
from pathlib import Path

from fastrl.train import reward
from fastrl.train.config import RewardModelConfig
from fastrl.train.model.sequence_scorer import load_scorer
from fastrl.train.run.checkpoint import latest


def pair_settings(directory):
    """Settings of a run of seconds: whether the completion repeats the digit of the prompt."""
    pairs = [
        {"prompt": f"say {i}:", "chosen": str(i), "rejected": str(j)}
        for i in range(10)
        for j in range(10)
        if i != j
    ]
    for name, some in (("train", pairs[::2]), ("held_out", pairs[1::2])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in some))
    return {
        "out_dir": str(directory / "runs"),
        "train_file": str(directory / "train.jsonl"),
        "held_out_file": str(directory / "held_out.jsonl"),
        "warm_start_steps": 0,
        "schedule": "constant",  # with which a run may be resumed for more steps
        "pairs_per_step": 16,
        "steps": 3,
    }


def run_pairs(settings, **changes):
    return reward.train(RewardModelConfig(**{**settings, **changes}))


def scorer_weights(directory):
    """The weights of the latest checkpoint."""
    checkpoint = str(latest(Path(directory) / "checkpoints"))
    return load_scorer(checkpoint, "cpu", setting="model").model.state_dict()
