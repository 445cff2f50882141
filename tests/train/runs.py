"""Short runs of the training loops, and what they leave in their directory."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from fastrl.train import grpo, ppo, run_log
from fastrl.train.checkpoint import latest
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.prompts import Prompt
from fastrl.train.rewards import Rewards

LOOPS = {"grpo": (grpo.train, GrpoConfig), "ppo": (ppo.train, PpoConfig)}
OWN = {"grpo": {"group_size": 4}, "ppo": {}}
MEASURED = ("tokens_per_second", "seconds_", "peak_gb_")  # differ from run to run


def run(loop, settings, **changes):
    train, kind = LOOPS[loop]
    return train(kind(**{**OWN[loop], **settings, **changes}))


def rewards_of(*names, **settings):
    config = GrpoConfig(reward=names, **{"max_new_tokens": 10, **settings})
    return Rewards(config, torch.device("cpu"))


def asked(*answers):
    """Prompts with these answers."""
    given = [{"prompt": f"question {i}", "answer": answer} for i, answer in enumerate(answers)]
    return [Prompt(record, []) for record in given]


def rows(directory):
    """The logged rows, without what a clock measured."""
    logged = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in logged]


def saved(directory):
    """All that the latest checkpoint holds: weights or adapter, optimizer, generators, ..."""
    last = latest(Path(directory) / "checkpoints")
    (tensors,) = last.glob("*.safetensors")
    return load_file(tensors), torch.load(last / "state.pt", weights_only=True)


def equal(one, other):
    """Whether two nested values, with tensors in them, are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def assert_same(one, other):
    """Two runs logged the same and ended in the same state."""
    assert rows(one) == rows(other)
    assert equal(saved(one), saved(other))


def train_alone(loop, settings):
    """Train in a process of its own, forked from one that has imported this module."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    run_log.write_report = lambda *_: None  # most of the time of a short run
    run(loop, settings, resume=Path(settings["out"], "config.json").exists())


def kill(process, reached, *, seconds, while_alive=lambda: None):
    """Start a run, and kill it some seconds after it has reached something."""
    process.start()
    deadline = time.monotonic() + 120
    while not reached():
        assert process.is_alive(), "the run ended by itself"
        assert time.monotonic() < deadline
    time.sleep(seconds)
    while_alive()
    process.kill()
    process.join()
    assert process.exitcode < 0, "the run ended by itself"
