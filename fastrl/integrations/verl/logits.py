"""Logits from verl, which have any number of dimensions, and whose gradient may overwrite them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.ops._row_checks import refuse_unsafe_inplace


def rows(name: str, logits: Tensor) -> Tensor:
    """Return logits `[..., V]` in the shapes of fastrl, `[B, T, V]` or `[N, V]`.

    Raises:
        TypeError: the logits are a nested tensor or a DTensor.
    """
    if logits.is_nested or type(logits).__name__ == "DTensor":
        kind = "a nested tensor" if logits.is_nested else "a DTensor"
        raise TypeError(f"{name} must be a plain padded or packed tensor, got {kind}")
    return logits if logits.dim() in (2, 3) else logits.reshape(-1, logits.shape[-1])


def statistic(name: str, argument: str, logits: Tensor, vocab_group: Any = None) -> Tensor:
    """Return a field of `token_stats` that depends on no token, `[...]` from logits `[..., V]`."""
    flat = rows(argument, logits)
    any_token = torch.zeros(flat.shape[:-1], dtype=torch.int64, device=flat.device)
    stats = fastrl.token_stats(flat, any_token, outputs=(name,), vocab_group=vocab_group)
    value: Tensor = getattr(stats, name)
    return value.reshape(logits.shape[:-1])


def may_overwrite(logits: Tensor) -> bool:
    """Return whether a backward may write the gradient over these logits."""
    try:
        refuse_unsafe_inplace("inplace_backward", logits)
    except ValueError:
        return False
    return True
