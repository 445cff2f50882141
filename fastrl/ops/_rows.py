"""Rows of logits as every backend takes them: `[B, T, V]`, checked, masked rows marked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.checks import (
    as_mask,
    can_read,
    floating,
    integer,
    on_device,
    positive,
    saveable,
    whole,
)

#: The largest of temperature, logit_scale, logit_softcap and their quotients, and the reciprocal of
#: the smallest: float32 holds them, and the exponents of logits up to 1e8.
_STEEPEST = 1e30


class Rows(NamedTuple):
    """What the token functions share; `temperature` is a float or a tensor `[B, T]`."""

    logits: Tensor
    token_ids: Tensor
    active: Tensor
    temperature: float | Tensor
    logit_scale: float
    logit_softcap: float | None

    def kernel_arguments(self) -> tuple[Tensor, Tensor, Tensor | None, float, float, float]:
        """Return token_ids, active, temperatures, temperature, logit_scale, logit_softcap."""
        per_row = isinstance(self.temperature, Tensor)
        return (
            self.token_ids.contiguous(),
            self.active.contiguous(),
            self.temperature if per_row else None,
            1.0 if per_row else self.temperature,
            self.logit_scale,
            self.logit_softcap or 0.0,
        )  # type: ignore[return-value]


def as_rows(
    logits: object,
    token_ids: object,
    mask: object,
    temperature: object,
    logit_scale: object,
    logit_softcap: object,
    ignore_index: object,
    *,
    name: str = "logits",
    vocabulary: int | None = None,
) -> Rows:
    """Check the arguments of a token function and bring them to `[B, T, V]` without a copy.

    The linear forms pass hidden states as `logits`, say so in `name`, and give the vocabulary.
    """
    x = floating(name, logits)
    ids = integer("token_ids", token_ids).to(torch.int64)
    if ids.dim() not in (1, 2):
        raise ValueError(f"token_ids must have shape [B, T] or [N], got {tuple(ids.shape)}")
    if x.dim() != ids.dim() + 1 or x.shape[:-1] != ids.shape:
        raise ValueError(
            f"{name} must have the shape {tuple(ids.shape)} of token_ids and one dimension more, "
            f"got {tuple(x.shape)}"
        )
    vocabulary = x.shape[-1] if vocabulary is None else vocabulary
    if vocabulary == 0:
        raise ValueError(f"{name} must have a vocabulary of at least 1, got {tuple(x.shape)}")
    on_device("token_ids", ids, x, name)
    active = ids != whole("ignore_index", ignore_index)
    if mask is not None:
        active = active & as_mask("mask", mask, ids, "token_ids")
    scale = _moderate("logit_scale", logit_scale, {})
    scales = {"logit_scale": scale}
    softcap = None
    if logit_softcap is not None:
        softcap = scales["logit_softcap"] = _moderate("logit_softcap", logit_softcap, scales)
    heat = _temperature(temperature, ids, active, x.dtype, scales)
    if can_read(ids):
        _refuse_ids_outside(ids, active, vocabulary)
    ids, active = saveable(ids), saveable(active)
    if ids.dim() == 1:
        x, ids, active = x[None], ids[None], active[None]
        heat = heat[None] if isinstance(heat, Tensor) else heat
    return Rows(x, ids, active, heat, scale, softcap)


def _moderate(name: str, value: object, beside: dict[str, float]) -> float:
    """Return a number above 0 that float32 holds, and its quotients with those beside it."""
    result = positive(name, value)
    low, high = _bounds(beside)
    if not low <= result <= high:
        others = f" beside {', '.join(beside)}" if beside else ""
        raise ValueError(
            f"{name} must lie in [{low:g}, {high:g}]{others}, for float32 to hold what is made of "
            f"it; got {result}"
        )
    return result


def _bounds(beside: dict[str, float]) -> tuple[float, float]:
    others = (1.0, *beside.values())
    return max(others) / _STEEPEST, min(others) * _STEEPEST


def _temperature(
    temperature: object, ids: Tensor, active: Tensor, dtype: torch.dtype, scales: dict[str, float]
) -> float | Tensor:
    if not isinstance(temperature, Tensor):
        return _moderate("temperature", temperature, scales)
    heat = floating("temperature", temperature)
    on_device("temperature", heat, ids, "token_ids")
    if heat.requires_grad:
        raise ValueError("temperature must not require a gradient: it has none")
    allowed: list[tuple[int, ...]] = [tuple(ids.shape), ()]
    if ids.dim() == 2:
        allowed += [(ids.shape[0],), (ids.shape[0], 1)]
    if tuple(heat.shape) not in allowed:
        raise ValueError(
            f"temperature must be a float or have one of the shapes {allowed}, "
            f"got {tuple(heat.shape)}"
        )
    if ids.dim() == 2 and heat.dim() == 1:
        heat = heat[:, None]
    real = torch.float64 if dtype == torch.float64 else torch.float32
    heat = saveable(heat.to(real).expand(ids.shape).contiguous())
    if can_read(heat):
        bad = active & ~((heat > 0) & heat.isfinite())
        if bool(bad.any()):
            raise ValueError(f"temperature must be above 0 and finite, got {float(heat[bad][0])}")
        low, high = _bounds(scales)
        steep = active & ((heat < low) | (heat > high))
        if bool(steep.any()):
            _moderate("temperature", float(heat[steep][0]), scales)
    return heat


def _refuse_ids_outside(ids: Tensor, active: Tensor, vocabulary: int) -> None:
    bad = active & ((ids < 0) | (ids >= vocabulary))
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"token_ids must lie in [0, {vocabulary}) or be ignore_index, "
            f"got {int(ids[where])} at {where if len(where) > 1 else where[0]}"
        )


def refuse_unsafe_inplace(name: str, logits: Tensor) -> None:
    """Raise if writing the gradient over the logits would destroy something else."""
    if logits.is_leaf and logits.requires_grad:
        raise ValueError(
            f"{name}=True needs logits that are no leaf: the gradient of a leaf would be written "
            "over its own values"
        )
    base = logits._base
    if base is not None and base.is_leaf and base.requires_grad:
        raise ValueError(
            f"{name}=True needs logits that are no view of a leaf: the gradient would be written "
            "over the leaf's values"
        )
    # (a compiled graph writes elsewhere, whatever is permitted)
    if not torch.compiler.is_compiling() and _rows_overlap(logits):
        raise ValueError(
            f"{name}=True needs logits whose rows do not share memory, got strides "
            f"{tuple(logits.stride())} for shape {tuple(logits.shape)}"
        )


def _rows_overlap(logits: Tensor) -> bool:
    """Say whether an element may belong to two rows: some stride is within what is inside it."""
    inside = 1
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride < inside:
            return logits.numel() > 0
        inside = max(inside, stride * (size - 1) + inside)
    return False
