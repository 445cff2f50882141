"""Functions on several gloo ranks: processes of this machine, forked from one with all imports."""

import functools
import io
import multiprocessing.forkserver
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]
#: How long a rank may wait for another before torch raises.
PATIENCE = 90
#: What the ranks find imported; a DTensor and a compiled function else cost each of them seconds.
IMPORTED = [
    "tests.ops.ranks.gloo_ranks",
    "fastrl",
    "torch.distributed.tensor",
    "torch._dynamo",
    "pytest",
]


def on_ranks(world, function, *arguments, seconds=300):
    """What ``function(*arguments)`` returned on each of ``world`` ranks, in their order.

    The function is one of a module; torch.distributed is initialized. If it raises on a rank, so
    does this, with the text of every rank that did.
    """
    context = _server()
    with tempfile.TemporaryDirectory() as directory:
        ends = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=_rank, args=(rank, world, directory, end, function, arguments))
            for rank, (_, end) in enumerate(ends)
        ]
        for process, (_, writing) in zip(processes, ends, strict=True):
            process.start()
            writing.close()
        try:
            outcomes = [_outcome(reading, seconds) for reading, _ in ends]
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
    failed = {rank: text for rank, (text, _) in enumerate(outcomes) if text is not None}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return [result for _, result in outcomes]


@functools.cache
def _server():
    """The context of a process to fork from, one for all tests of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()
    return context


def _outcome(reading, seconds):
    """The error and the result of a rank."""
    if not reading.poll(seconds):
        return "does not end", None
    try:
        text, stored = reading.recv()
    except EOFError:
        return "died", None
    return text, None if stored is None else torch.load(io.BytesIO(stored), weights_only=False)


def _rank(rank, world, directory, writing, function, arguments):
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    text, stored = None, None
    try:
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/ranks",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=PATIENCE),
        )
        memory = io.BytesIO()
        torch.save(function(*arguments), memory)
        stored = memory.getvalue()
        dist.destroy_process_group()
    except BaseException:
        text = traceback.format_exc()
    writing.send((text, stored))
