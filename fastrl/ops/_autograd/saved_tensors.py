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
    ctx.inference_tensors = None
    if not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()):
        of_inference = [x if x is not None and x.is_inference() else None for x in tensors]
        if any(x is not None for x in of_inference):
            ctx.inference_tensors = of_inference
            pairs = zip(tensors, of_inference, strict=True)
            tensors = tuple(x if inference is None else None for x, inference in pairs)
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> list[Any]:
    """Return the tensors in the order of `save`."""
    if ctx.inference_tensors is None:
        return [*ctx.saved_tensors]
    pairs = zip(ctx.saved_tensors, ctx.inference_tensors, strict=True)
    return [inference if x is None else x for x, inference in pairs]
