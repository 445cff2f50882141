"""Rows of logits or hidden states as every backend takes them: checked, `[B, T]` and more."""

from __future__ import annotations

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
    unread_mask,
    whole,
)
from fastrl.contract import RowArguments

#: The largest of temperature, logit_scale, logit_softcap and their quotients, and the reciprocal of
#: the smallest: float32 holds them, and the exponents of logits up to 1e8.
_STEEPEST = 1e30


def as_rows(
    inputs: object,
    token_ids: object,
    mask: object,
    temperature: object,
    logit_scale: object,
    logit_softcap: object,
    ignore_index: object,
    *,
    name: str = "logits",
    vocabulary: int | None = None,
) -> tuple[Tensor, RowArguments]:
    """Check logits and what accompanies them; return both as `[B, T, V]` and `[B, T]`, not copied.

    The linear forms pass hidden states, say so in `name`, and give the vocabulary. What mask and
    token_ids hold is for the kernels to check, or for `active_rows`.
    """
    x = floating(name, inputs)
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
    ignored = whole("ignore_index", ignore_index)
    given = None if mask is None else unread_mask("mask", mask, ids, "token_ids")
    scale = _moderate("logit_scale", logit_scale, {})
    scales = {"logit_scale": scale}
    softcap = 0.0
    if logit_softcap is not None:
        softcap = scales["logit_softcap"] = _moderate("logit_softcap", logit_softcap, scales)
    if ids.dim() == 1:
        x, ids, given = x[None], ids[None], None if given is None else given[None]
        if isinstance(temperature, Tensor) and temperature.dim() == 1:
            temperature = temperature[None]
    packed = ids.shape[0] == 1 and integer("token_ids", token_ids).dim() == 1
    rows = RowArguments(
        token_ids=saveable(ids.contiguous()),
        mask=None if given is None else saveable(given.contiguous()),
        ignore_index=ignored,
        temperatures=None,
        temperature=1.0,
        logit_scale=scale,
        logit_softcap=softcap,
    )
    if not isinstance(temperature, Tensor):
        return x, rows._replace(temperature=_moderate("temperature", temperature, scales))
    heat = _temperatures(temperature, rows, x.dtype, scales, packed=packed)
    return x, rows._replace(temperatures=heat)


def active_rows(rows: RowArguments, vocabulary: int) -> Tensor:
    """Return which rows count, bool `[B, T]`; check mask and ids where that costs nothing."""
    active = rows.token_ids != rows.ignore_index
    if rows.mask is not None:
        active = active & as_mask("mask", rows.mask, rows.token_ids, "token_ids")
    if can_read(rows.token_ids):
        bad = active & ((rows.token_ids < 0) | (rows.token_ids >= vocabulary))
        if bool(bad.any()):
            where = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"token_ids must lie in [0, {vocabulary}) or be ignore_index, "
                f"got {int(rows.token_ids[where])} at {where}"
            )
    return active


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


def _temperatures(
    heat: Tensor, rows: RowArguments, dtype: torch.dtype, scales: dict[str, float], *, packed: bool
) -> Tensor:
    """Return a temperature per row, `[B, T]`."""
    floating("temperature", heat)
    shape = tuple(rows.token_ids.shape)
    on_device("temperature", heat, rows.token_ids, "token_ids")
    if heat.requires_grad:
        raise ValueError("temperature must not require a gradient: it has none")
    allowed: list[tuple[int, ...]] = [shape, ()]
    allowed += [] if packed else [shape[:1], (shape[0], 1)]
    if tuple(heat.shape) not in allowed:
        takes, came = allowed, tuple(heat.shape)
        if packed:
            takes, came = [shape[1:], ()], came[1:] if came[:1] == (1,) else came
        raise ValueError(
            f"temperature must be a float or have one of the shapes {takes}, got {came}"
        )
    heat = heat[:, None] if heat.dim() == 1 else heat
    real = torch.float64 if dtype == torch.float64 else torch.float32
    heat = saveable(heat.to(real).expand(shape).contiguous())
    if can_read(heat):
        active = rows.token_ids != rows.ignore_index
        if rows.mask is not None:
            active = active & (rows.mask != 0)
        bad = active & ~((heat > 0) & heat.isfinite())
        if bool(bad.any()):
            raise ValueError(f"temperature must be above 0 and finite, got {float(heat[bad][0])}")
        low, high = _bounds(scales)
        steep = active & ((heat < low) | (heat > high))
        if bool(steep.any()):
            _moderate("temperature", float(heat[steep][0]), scales)
    return heat


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
