"""Tensors that a backward needs, some of which autograd refuses to keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Keep tensors for the backward, also those that were made in inference mode.

    `save_for_backward` refuses these, and a copy of an LM head would take as much memory again.
    """
    frozen = [_of_inference(x) for x in tensors]
    ctx.save_for_backward(*(None if kept else x for x, kept in zip(tensors, frozen, strict=True)))
    ctx.of_inference = [x if kept else None for x, kept in zip(tensors, frozen, strict=True)]


def saved(ctx: Any) -> list[Any]:
    """Return the tensors in the order of `save`."""
    pairs = zip(ctx.saved_tensors, ctx.of_inference, strict=True)
    return [kept if x is None else x for x, kept in pairs]


def _of_inference(x: Tensor | None) -> bool:
    if x is None or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return x.is_inference()
