"""The process group of a run that ``torchrun`` started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fastrl.train.config import LoopConfig
from fastrl.train.distributed import ranks
from fastrl.train.run.interrupt import Interrupt

_joined = 0  # how many times, in this process


@contextmanager
def joined(config: LoopConfig) -> Iterator[None]:
    """Join the other ranks, if torchrun started several, and leave them at the end.

    The tensors of GPUs are exchanged by NCCL, those of CPUs by gloo; rank N of a machine has its
    GPU N.

    Raises:
        ValueError: The machine has fewer GPUs than ranks, or the setting ``device`` names one GPU.
        RankError: Another rank does not join, or has ended.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    if config.device not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"device must be auto, cpu or cuda with several ranks, got {config.device!r}"
        )
    if on_gpu:
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(
                f"device: there are {os.environ['LOCAL_WORLD_SIZE']} ranks on a machine with {gpus}"
                " GPUs; start as many with torchrun --nproc-per-node"
            )
        torch.cuda.set_device(local)
    try:
        _join("cpu:gloo,cuda:nccl" if on_gpu else "gloo", config.rank_timeout)
    except RuntimeError as raised:
        error: Any = ranks.RankError(f"the ranks could not be joined: {raised}")
        error.on_all_ranks = False
        raise error from raised
    try:
        with _explaining():
            yield
    except Exception as error:
        if ranks.on_all_ranks(error):
            _leave()  # else that would wait for ranks that are gone
        raise
    _leave()


@contextmanager
def _explaining() -> Iterator[None]:
    """As `ranks.explaining`, which takes seconds; when a rank is gone, torchrun ends the others."""
    try:
        yield
    except Exception:
        with Interrupt(), ranks.explaining():
            raise


def _join(backend: str, seconds: float) -> None:
    timeout = timedelta(seconds=seconds)
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    group = _part(store, "group")
    dist.init_process_group(backend, timeout=timeout, store=group, rank=rank, world_size=world)
    global _joined
    _joined += 1
    exchange = dist.new_group(backend="gloo", timeout=timeout)
    ranks.use_for_exchange(exchange, _part(store, f"run/{_joined}"))


def reports(error: Exception) -> bool:
    """Whether this process tells of an error: the first rank of those that have it."""
    return os.environ.get("RANK", "0") == "0" or not ranks.on_all_ranks(error)


def _part(store: Any, name: str) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _leave() -> None:
    ranks.use_for_exchange(None, None)
    dist.destroy_process_group()


def check_joined() -> None:
    """Raise a `ValueError` in a process of torchrun's that has not joined the others.

    Each would train alone, and only the first could write its files.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the ranks are not joined: call the "
            "loop within fastrl.train.distributed.process_group.joined(config)"
        )
