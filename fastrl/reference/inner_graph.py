"""Gradients that a call computes internally, in any autograd mode and under any hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def inner_graph() -> Iterator[None]:
    """Record a graph that the caller's hooks on saved tensors (checkpointing, offloading) skip.

    Saved tensors are detached: a saved output with its node would keep itself alive, in a cycle
    that nothing collects. With hooks, autograd does not check whether saved tensors were
    overwritten, so these hooks do.

    Raises:
        RuntimeError: the gradient needs a tensor that was modified in place.
    """
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(x: Tensor) -> tuple[Tensor, int]:
    return x.detach(), 0 if x.is_inference() else x._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    if not x.is_inference() and x._version != version:
        raise RuntimeError(
            "a tensor that the gradient needs was modified by an inplace operation, of shape "
            f"{tuple(x.shape)}: compute a new one instead"
        )
    return x
