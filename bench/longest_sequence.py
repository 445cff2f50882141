"""The longest sequence that fits one GPU, and the speed of each part of a GRPO step on it.

    python bench/longest_sequence.py [--model 0.6B 8B] [--out FOLDER]
        [--settings logits linear checkpointing on trl trl-fastrl]

Qwen3 models with random weights: 0.6B with float32 weights under bfloat16 autocast, and 8B in
bfloat16 with LoRA of rank 16. A process each tries a length: it scores one sequence, learns from
it, and updates the weights. Lengths double until one does not fit, then the last gap is halved
--halvings times. Each attempt is written to FOLDER/longest_sequence.jsonl as it ends, with the
seconds, tokens per second and peak memory of each part, beside what `fastrl.train.plan` predicts.
The settings `trl` are TRL's GRPOTrainer with its defaults (trl_step.py), `trl-fastrl` the same with
`use_fastrl`; their memory is not predicted. They checkpoint, so `checkpointing` is ours to compare.
`--start N --most N --halvings 0` tries one length. A step that fails for want of anything but
memory ends its row, with the reason.
--smoke runs it with a tiny model on the CPU, where 2,048 tokens count as the limit.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from trl_step import trl_step

ROOT = Path(__file__).parent.parent
# hidden size, MLP size, layers, heads, key heads, tied embeddings
MODELS = {"0.6B": (1024, 3072, 28, 16, 8, True), "8B": (4096, 12288, 36, 32, 8, False)}
SMOKE = (64, 128, 2, 4, 2, True)
OF_MODEL: dict[str, dict[str, Any]] = {
    "0.6B": {"precision": "bfloat16"},
    "8B": {"precision": "bfloat16", "weights": "bfloat16", "lora_rank": 16},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "logits": {"loss": "logits"},
    "linear": {"loss": "linear"},
    "checkpointing": {"gradient_checkpointing": True},
    "on": {"gradient_checkpointing": True, "offload_checkpoints": True, "mlp_tile": 2048},
    "trl": {},
    "trl-fastrl": {},
}
SMOKE_LIMIT = 2048


class Case(NamedTuple):
    """What a process tries."""

    model: str
    settings: str
    tokens: int
    smoke: bool


def main() -> None:
    given = _options()
    if given.case:
        print(json.dumps(_attempt(Case(*json.loads(given.case)))))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.total_seconds
    for model in given.model:
        for settings in given.settings:
            print(f"{model}, {settings}: {_longest(given, model, settings, end)}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--start", type=int, help="the first length, in tokens; default: 4096")
    parser.add_argument("--most", type=int, default=2**20, help="longer ones are not tried")
    parser.add_argument("--halvings", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240, help="limit of one attempt")
    parser.add_argument("--total-seconds", type=float, default=float("inf"), help="of all")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--case", help="try this one, here: JSON")
    return parser.parse_args()


class EndedError(Exception):
    """No longer sequence can be tried, for another reason than memory."""


def _longest(given: argparse.Namespace, model: str, settings: str, end: float) -> str:
    """Return in words how many tokens fit."""
    fits, tokens, reason = 0, given.start or (512 if given.smoke else 4096), ""

    def fit(tokens: int) -> bool:
        return _fits(given, Case(model, settings, tokens, given.smoke), end)

    try:
        while tokens <= given.most and fit(tokens):
            fits, tokens = tokens, 2 * tokens
        too_long = tokens
        for _ in range(given.halvings if fits > 0 and too_long <= given.most else 0):
            tokens = (fits + too_long) // 2
            if fit(tokens):
                fits = tokens
            else:
                too_long = tokens
    except EndedError as ended:
        reason = f"; not tried further: {ended}"
    return f"{fits or 'no'} tokens fit{reason}"


def _fits(given: argparse.Namespace, case: Case, end: float) -> bool:
    """Try a length in a process of its own; whether memory sufficed."""
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    seconds = min(given.seconds, end - time.monotonic())
    if seconds <= 0:
        raise EndedError("out of time")
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds
        )
        reason = (child.stderr.strip().splitlines() or ["no message"])[-1][:200]
        found = json.loads(child.stdout.splitlines()[-1]) if not child.returncode else {}
    except subprocess.TimeoutExpired:
        reason, found = f"longer than {seconds:.0f} s", {}
    row = {**case._asdict(), **(found or {"failed": reason})}
    with (given.out / "longest_sequence.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    if not found and not re.search("out ?of ?memory", reason, re.IGNORECASE):
        raise EndedError(reason)
    return bool(found)


def _attempt(case: Case) -> dict[str, float]:
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT))
    import transformers

    from fastrl.train.config import GrpoConfig
    from fastrl.train.model_shape import Shape
    from fastrl.train.plan import plan

    if case.settings.startswith("trl"):  # what is missing is told before weights are made
        import datasets  # noqa: F401
        import trl  # noqa: F401
    if case.smoke and case.tokens > SMOKE_LIMIT:
        raise torch.OutOfMemoryError(f"the smoke test ends at {SMOKE_LIMIT} tokens")
    hidden, inner, layers, heads, keys, tied = SMOKE if case.smoke else MODELS[case.model]
    sizes = transformers.Qwen3Config(
        vocab_size=1000 if case.smoke else 151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=16 if case.smoke else 128,
        max_position_embeddings=2**20,
        tie_word_embeddings=tied,
    )
    settings = {**OF_MODEL[case.model], **SETTINGS[case.settings]}
    if case.smoke:  # nothing to move to the host
        settings.pop("offload_checkpoints", None)
    with tempfile.TemporaryDirectory() as folder:
        sizes.save_pretrained(folder)
        config = GrpoConfig(model=folder, **settings)
        shape, device = Shape(config), "cpu" if case.smoke else "gpu"
    found = plan(config, shape, tokens=case.tokens, total=case.tokens, device=device)
    place = "cpu" if case.smoke else "cuda"
    with torch.device(place):
        model = transformers.AutoModelForCausalLM.from_config(
            sizes, dtype=getattr(torch, config.dtype)
        )
    if case.settings.startswith("trl"):
        fused = case.settings == "trl-fastrl"
        return trl_step(model, case.tokens, place, fused=fused, lora_rank=config.lora_rank)
    row = _step(model, config, case.tokens, place)
    return {**row, "predicted_gb_learn": found.learning / 1e9}


def _step(model: Any, config: Any, tokens: int, device: str) -> dict[str, float]:
    from fastrl import Objective
    from fastrl.train import adapters
    from fastrl.train.optimizers import apply, make_optimizer
    from fastrl.train.packing import normalizer
    from fastrl.train.phases import Phases
    from fastrl.train.policy import batches, completion_logprobs, policy_loss, policy_outputs
    from fastrl.train.recomputation import save_memory
    from fastrl.train.rollout import Rollout

    if config.lora_rank:
        model = adapters.attach(model, config, "random weights")
    save_memory(model, config)
    optimizer = make_optimizer(model.parameters(), config)
    phase, objective = Phases(torch.device(device)), Objective.preset("grpo")

    def step(length: int) -> None:
        shape = (1, length - 64)
        rollout = Rollout(
            prompts=torch.randint(1000, (1, 64)).tolist(),
            prompt_of=torch.zeros(1, dtype=torch.long),
            token_ids=torch.randint(1000, shape, device=device),
            mask=torch.ones(shape, dtype=torch.bool, device=device),
            logprobs=torch.zeros(shape, device=device),
            truncated=torch.zeros(1, dtype=torch.bool, device=device),
        )
        rows, advantages = torch.zeros(1, dtype=torch.long), torch.ones(1, device=device)
        with phase("logprobs"):
            old = completion_logprobs(model, rollout, rows, config)
        for batch in batches(rollout, rows, rollout.mask, config):
            with phase("learn"):
                policy_loss(
                    policy_outputs(model, batch, config),
                    batch,
                    config,
                    advantages[batch.rows],
                    old_logprobs=batch.take(old),
                    objective=objective,
                    normalizer=normalizer(rollout.mask, objective.aggregation),
                ).loss.backward()
        with phase("update"):
            apply(optimizer, config, 0)

    step(256)  # compiles the kernels, makes the optimizer's state
    phase.read()
    step(tokens)
    row = phase.read()
    speeds = {
        f"tokens_per_second_{name}": tokens / row[f"seconds_{name}"]
        for name in ("logprobs", "learn")
    }
    return row | speeds


if __name__ == "__main__":
    main()
