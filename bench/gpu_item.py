"""One case of bench/gpu.py, and the providers that most cases share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from timing import Case

from fastrl.backend import unavailable

#: Compiled for each shape alone. The default mode leaves GEMMs to cuBLAS; "max-autotune" would
#: spend minutes on tuning a GEMM of this size, and CUDA graphs would hide what a call costs the
#: host. With fullgraph a graph break or the recompile limit is an error, never eager in silence.
COMPILED = "dynamic=False, fullgraph=True, default mode"


class Item(NamedTuple):
    """A case that is built only when its turn comes, since its inputs fill much of the memory."""

    make: Callable[[], Case]
    small: bool  # so little work that the launch is what it costs
    flops: int = 0
    density: float = 1.0  # share of active rows


def backends(device: torch.device) -> list[str]:
    """The backends of fastrl that can run on the device."""
    names = ("triton", "cuda", "reference") if device.type == "cuda" else ("cpu", "reference")
    return [name for name in names if unavailable(name) is None]


def kernels(device: torch.device) -> list[str]:
    """Those with kernels."""
    return [name for name in backends(device) if name != "reference"]


def sequences(rows: int) -> int:
    """How many sequences rows are divided into, since peers take one advantage per sequence."""
    return 8 if rows % 8 == 0 else 2


def eager_forms(eager: Callable, device: torch.device) -> list[tuple[str, str, Callable]]:
    """Name, kind, function: eager and, on a GPU, compiled."""
    found = [("eager", "eager", eager)]
    if device.type == "cuda":
        compiled = torch.compile(eager, dynamic=False, fullgraph=True)
        found.append(("torch.compile", "compile", compiled))
    return found
