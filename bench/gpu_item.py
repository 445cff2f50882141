"""One case of bench/gpu.py, and the providers that most cases share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from timing import Case

from fastrl.backend import unavailable


class Item(NamedTuple):
    """A case that is built only when its turn comes, since its inputs fill much of the memory."""

    make: Callable[[], Case]
    small: bool  # so little work that the launch is what it costs
    flops: int = 0


def backends(device: torch.device) -> list[str]:
    """The backends of fastrl that can run on the device."""
    names = ("triton", "cuda", "reference") if device.type == "cuda" else ("cpu", "reference")
    return [name for name in names if unavailable(name) is None]


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _compiled(function):
    return torch.compile(function, dynamic=True)


def eager_forms(eager, device, *, compile_it: bool = True) -> list[tuple[str, str, Callable]]:
    found = [("eager", "eager", eager)]
    if compile_it and device.type == "cuda":
        found.append(("torch.compile", "compile", _compiled(eager)))
    return found
