"""Gradients that a call computes for itself, whatever the caller's autograd mode and hooks are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def inner_graph() -> Iterator[None]:
    """Record a graph that the caller's hooks on saved tensors (checkpointing, offloading) skip.

    The saved tensors are detached: a saved output that had its node would keep itself alive, in a
    cycle that nothing collects.
    """
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, _unchanged):
        yield


def _unchanged(x: Tensor) -> Tensor:
    return x
