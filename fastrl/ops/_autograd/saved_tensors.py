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
    pairs = [(x, _is_inference(x)) for x in tensors]
    ctx.save_for_backward(*(None if inference else x for x, inference in pairs))
    ctx.inference_tensors = [x if inference else None for x, inference in pairs]


def saved(ctx: Any) -> list[Any]:
    """Return the tensors in the order of `save`."""
    pairs = zip(ctx.saved_tensors, ctx.inference_tensors, strict=True)
    return [inference if x is None else x for x, inference in pairs]


def _is_inference(x: Tensor | None) -> bool:
    if x is None or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return x.is_inference()
