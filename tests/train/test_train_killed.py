"""A run that is killed at random moments, and resumed each time, equals one that is not.

`FASTRL_KILLS` is the number of kills of each loop, by default 3.
"""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.run.checkpoint import latest
from tests.support.train_runs import LOOPS, rows, train_alone, weights

KILLS = int(os.environ.get("FASTRL_KILLS", "3"))
STEPS = 10


class Killer:
    """Starts a run, and kills it when a step is reached, while a checkpoint is written or not."""

    def __init__(self, loop, settings, path):
        self.loop, self.settings, self.path = loop, settings, path
        self.directory = Path(settings["out_dir"]) / settings["name"]
        self.chance = random.Random(settings["seed"])
        self.processes = multiprocessing.get_context("forkserver")

    def start(self):
        resume = (self.directory / "config.json").exists()
        arguments = (self.loop, {**self.settings, "resume": resume}, self.path)
        process = self.processes.Process(target=train_alone, args=arguments)
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

    def kill(self, step, *, in_write):
        """Kill a run once it has logged ``step``; whether a checkpoint was being written."""
        process = self.start()
        deadline = time.monotonic() + 120
        reached = self.writing if in_write else self.directory.exists
        while self.logged() < step or not reached():
            assert process.is_alive(), "the run ended by itself"
            assert time.monotonic() < deadline
        time.sleep(self.chance.uniform(0, 0.03 if in_write else 0.5))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run ended by itself"
        return self.writing()


@pytest.fixture
def preloaded(monkeypatch):
    """Processes that are forked from one that has imported everything, but computed nothing."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([train_alone.__module__, "matplotlib.backends.backend_agg"])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_killed_run_resumes_to_the_same_metrics_and_weights(small, tmp_path, loop, preloaded):
    settings = {
        **small,
        "steps": STEPS,
        "kl_coef": 0.05,
        "warm_start_steps": 3,
        "warm_start_batch": 8,
        "eval_every": 3,
        "save_every": 1,
        "prompts_per_step": 8,
        "learning_rate": 1e-3,
    }
    killer = Killer(loop, {**settings, "name": "killed", "seed": 5}, str(tmp_path))
    in_write = 0
    for i in range(KILLS):
        step = i * (STEPS - 1) // KILLS - (i == 0)  # the first kill is before anything is logged
        killed_in_write = killer.kill(step, in_write=i % 2 == 1)
        while i % 2 == 1 and not killed_in_write:  # it was over before the kill
            killed_in_write = killer.kill(step, in_write=True)
        in_write += killed_in_write
    killer.finish()
    whole = Killer(loop, {**settings, "name": "whole", "seed": 5}, str(tmp_path))
    whole.finish()

    assert in_write >= KILLS // 2
    assert rows(killer.directory) == rows(whole.directory)
    assert [row["step"] for row in rows(killer.directory)] == list(range(STEPS + 1))
    one, other = weights(killer.directory), weights(whole.directory)
    assert all(torch.equal(one[name], other[name]) for name in one)
    states = [
        torch.load(latest(directory / "checkpoints") / "state.pt", weights_only=True)
        for directory in (killer.directory, whole.directory)
    ]
    moments = [state["optimizer"]["state"] for state in states]
    assert moments[0].keys() == moments[1].keys()
    for key in moments[0]:
        assert torch.equal(moments[0][key]["exp_avg_sq"], moments[1][key]["exp_avg_sq"])
    left = {path.name for path in killer.directory.rglob("*") if path.name.startswith(".")}
    assert not left
