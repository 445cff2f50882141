"""A run that is killed at random moments, and resumed each time, equals one that is not.

`FASTRL_KILLS` is the number of kills of each loop, by default 3.
"""

import multiprocessing
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.run.checkpoint import latest, rng_state, set_rng_state
from tests.support.pair_runs import pair_settings, run_pairs, scorer_weights
from tests.support.train_runs import LOOPS, rows, run, train_alone, weights

KILLS = int(os.environ.get("FASTRL_KILLS", "3"))
STEPS = 10


class Killer:
    """Starts a run, and kills it when a step is reached, while a checkpoint is written or not."""

    def __init__(self, train, settings, path):
        self.train, self.settings, self.path = train, settings, path
        self.directory = Path(settings["out_dir"]) / settings["name"]
        self.chance = random.Random(settings["seed"])
        self.processes = multiprocessing.get_context("forkserver")

    def start(self):
        resume = (self.directory / "config.json").exists()
        arguments = (self.train, {**self.settings, "resume": resume}, self.path)
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
    modules = [train_alone.__module__, run_pairs.__module__, "matplotlib.backends.backend_agg"]
    context.set_forkserver_preload(modules)


SETTINGS = {
    "steps": STEPS,
    "warm_start_steps": 3,
    "warm_start_batch": 8,
    "eval_every": 3,
    "save_every": 1,
    "learning_rate": 1e-3,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_killed_run_resumes_to_the_same_metrics_and_weights(small, tmp_path, loop, preloaded):
    settings = {**small, **SETTINGS, "kl_coef": 0.05, "prompts_per_step": 8}
    check_killed(partial(run, loop), weights, settings, tmp_path)


def test_a_killed_run_of_a_reward_model_resumes_to_the_same(tmp_path, preloaded):
    settings = {**pair_settings(tmp_path), **SETTINGS, "pairs_per_step": 256}  # longer steps
    check_killed(run_pairs, scorer_weights, settings, tmp_path)


def check_killed(train, weights_of, settings, path):
    """Kill a run at random moments, resume it, and compare it with one that is not killed."""
    killer = Killer(train, {**settings, "name": "killed", "seed": 5}, str(path))
    in_write = 0
    for i in range(KILLS):
        step = i * (STEPS - 1) // KILLS - (i == 0)  # the first kill is before anything is logged
        killed_in_write = killer.kill(step, in_write=i % 2 == 1)
        while i % 2 == 1 and not killed_in_write:  # it was over before the kill
            killed_in_write = killer.kill(step, in_write=True)
        in_write += killed_in_write
    killer.finish()
    whole = Killer(train, {**settings, "name": "whole", "seed": 5}, str(path))
    whole.finish()

    assert in_write >= KILLS // 2
    assert rows(killer.directory) == rows(whole.directory)
    assert [row["step"] for row in rows(killer.directory)] == list(range(STEPS + 1))
    one, other = weights_of(killer.directory), weights_of(whole.directory)
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


def test_every_random_state_is_restored():
    def numbers():
        return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002

    state = rng_state()
    drawn = numbers()
    assert numbers() != drawn
    set_rng_state(state)
    assert numbers() == drawn
