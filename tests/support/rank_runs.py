"""Runs on several ranks: gloo processes on this machine, forked from one that has imported all."""

import multiprocessing
import os
import random
import socket
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fastrl.train import gradients
from fastrl.train.distributed.process_group import joined
from fastrl.train.distributed.sharding import whole
from tests.support.train_runs import LOOPS, OWN, run

PARALLEL = ("ddp", "fsdp")
PRELOADED = ["tests.support.rank_runs", "matplotlib.backends.backend_agg"]


class Ended(NamedTuple):
    """How a run ended on a rank."""

    error: str | None
    steps: int | None
    drawn: list[float]  # from each generator, after the run


def run_ranks(world, loop, settings, path, *, gradients_to=None, before=None, seconds=120):
    """Run a loop on ``world`` ranks; how it ended on each, None if it was killed.

    Args:
        world: How many ranks.
        loop: ``"grpo"`` or ``"ppo"``.
        settings: Those of the run.
        path: A directory of modules that the run imports.
        gradients_to: A file for the gradients of each optimizer step.
        before: A function of this module, called in each rank with its index before the run.
        seconds: How long the ranks may take.
    """
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    outcomes = context.SimpleQueue()
    port = _free_port()
    arguments = (loop, settings, str(path), gradients_to, before, outcomes)
    processes = [
        context.Process(target=_rank, args=(rank, world, port, *arguments)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
        if process.is_alive():
            for other in processes:
                other.kill()
            raise AssertionError("the ranks wait for each other")
    got = dict(outcomes.get() for process in processes if process.exitcode == 0)
    return [got.get(rank) for rank in range(world)]


def _rank(rank, world, port, loop, settings, path, gradients_to, before, outcomes):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    sys.path.insert(0, path)
    torch.set_num_threads(1)
    error, steps = None, None
    try:
        config = LOOPS[loop][1](**{**OWN[loop], **settings})
        with joined(config):
            if gradients_to is not None:
                record_gradients(gradients_to, rank)
            if before is not None:
                before(rank)
            steps = run(loop, settings).step
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    drawn = [random.random(), torch.rand(1).item(), np.random.rand()]  # noqa: NPY002
    outcomes.put((rank, Ended(error, steps, drawn)))


def record_gradients(path, rank=0):
    """Save the gradients of each optimizer step; returns what puts `gradients.apply` back."""
    apply, steps = gradients.apply, []

    def record(optimizer, config, step):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        steps.append([whole(p.grad).clone() for p in parameters])
        if rank == 0:
            torch.save(steps, path)
        return apply(optimizer, config, step)

    gradients.apply = record
    return lambda: setattr(gradients, "apply", apply)


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def check_whole(ended):
    assert [end.error for end in ended] == [None] * len(ended)


def check_same_metrics(one, other, tolerance=1e-3):
    """Those of the same run on other ranks, to rounding."""
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for row, expected in zip(one, other, strict=True):
        assert row.keys() == expected.keys()
        for name in row.keys() - {"padded_tokens"}:  # each rank pads its own batches
            assert row[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance / 100), (
                name
            )
