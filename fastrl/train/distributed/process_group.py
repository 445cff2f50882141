"""The process group of a run that ``torchrun`` started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fastrl.train.config import LoopConfig
from fastrl.train.distributed import ranks


@contextmanager
def joined(config: LoopConfig) -> Iterator[None]:
    """Join the other ranks, if torchrun started several, and leave them at the end.

    The tensors of GPUs are exchanged by NCCL, those of CPUs by gloo; rank N of a machine has its
    GPU N.

    Raises:
        ValueError: The machine has fewer GPUs than ranks, or the setting ``device`` names one GPU.
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
    timeout = timedelta(seconds=config.rank_timeout)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timeout)
    ranks.use_for_exchange(dist.new_group(backend="gloo", timeout=timeout))
    try:
        yield
    finally:
        ranks.use_for_exchange(None)
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
