"""Short runs of the training loops, and what they leave in their directory."""

import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from fastrl.train import grpo, ppo, run_log
from fastrl.train.checkpoint import latest
from fastrl.train.config import GrpoConfig, PpoConfig

LOOPS = {"grpo": (grpo.train, GrpoConfig), "ppo": (ppo.train, PpoConfig)}
OWN = {"grpo": {"group_size": 4}, "ppo": {}}
MEASURED = ("tokens_per_second", "seconds_", "peak_gb_")  # differ from run to run


def run(loop, settings, **changes):
    train, kind = LOOPS[loop]
    return train(kind(**{**OWN[loop], **settings, **changes}))


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


def train_alone(train, settings):
    """Train in a process of its own, forked from one that has imported this module."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    run_log.write_report = lambda *_: None  # most of the time of a short run
    train(settings)


class Process:
    """A run in processes of its own, which are killed in a checkpoint's write or not."""

    def __init__(self, processes, loop, settings):
        self.processes, self.loop, self.settings = processes, loop, settings
        self.directory, self.chance = Path(settings["out"]), random.Random(5)

    def start(self):
        train = partial(run, self.loop, resume=(self.directory / "config.json").exists())
        process = self.processes.Process(target=train_alone, args=(train, self.settings))
        process.start()
        return process

    def finish(self):
        process = self.start()
        process.join(120)
        assert process.exitcode == 0

    def writing(self):
        return any((self.directory / "checkpoints").glob(".step-*.partial"))

    def logged(self):
        metrics = self.directory / "metrics.jsonl"
        return metrics.read_text().count("\n") - 1 if metrics.exists() else -1

    def kill(self, step, *, in_write, while_alive=lambda: None):
        """Kill a run once it has logged ``step``; whether a checkpoint was being written."""
        process = self.start()
        deadline = time.monotonic() + 120
        reached = self.writing if in_write else self.directory.exists
        while self.logged() < step or not reached():
            assert process.is_alive(), "the run ended by itself"
            assert time.monotonic() < deadline
        time.sleep(self.chance.uniform(0, 0.03 if in_write else 0.2))
        while_alive()
        process.kill()
        process.join()
        assert process.exitcode < 0, "the run ended by itself"
        return self.writing()
