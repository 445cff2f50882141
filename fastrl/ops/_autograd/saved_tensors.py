"""Tensors saved for a backward, including inference tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors for the backward, even those that were made in inference mode.

    `save_for_backward` rejects inference tensors, and a clone of an LM head would take too much
    memory.
    """
    ctx.of_inference = {}
    if not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()):
        found = {i: x for i, x in enumerate(tensors) if x is not None and x.is_inference()}
        if found:
            ctx.of_inference = found
            tensors = tuple(None if i in found else x for i, x in enumerate(tensors))
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> list[Any]:
    """Return the tensors in the order of `save`."""
    tensors = [*ctx.saved_tensors]
    for i, x in ctx.of_inference.items():
        tensors[i] = x
    return tensors
