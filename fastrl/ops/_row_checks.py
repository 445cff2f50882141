"""Checks of logits or hidden states, and of all arguments per row."""

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

#: Bound on temperature, logit_scale, logit_softcap, their quotients and all reciprocals: none of
#: them overflows in float32, nor do logits up to 1e8 after scaling.
_MAX_SCALE = 1e30


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
    """Check logits and their row arguments; return them as `[B, T, V]` and `[B, T]` without copies.

    The linear forms pass hidden states with `name="hidden"` and the size of the vocabulary. The
    values of mask and token_ids are checked by the kernels, or by `active_rows`.
    """
    x = floating(name, inputs)
    ids = integer("token_ids", token_ids).to(torch.int64)
    if ids.dim() not in (1, 2):
        raise ValueError(f"token_ids must have shape [B, T] or [N], got {tuple(ids.shape)}")
    if x.dim() != ids.dim() + 1 or x.shape[:-1] != ids.shape:
        raise ValueError(
            f"{name} must have the shape {tuple(ids.shape)} of token_ids plus one dimension, "
            f"got {tuple(x.shape)}"
        )
    vocabulary = x.shape[-1] if vocabulary is None else vocabulary
    if vocabulary == 0:
        raise ValueError(f"{name} must have a vocabulary of at least 1, got {tuple(x.shape)}")
    on_device("token_ids", ids, x, name)
    ignored = whole("ignore_index", ignore_index)
    checked_mask = None if mask is None else unread_mask("mask", mask, ids, "token_ids")
    scale = _bounded("logit_scale", logit_scale, {})
    scales = {"logit_scale": scale}
    softcap = 0.0
    if logit_softcap is not None:
        softcap = scales["logit_softcap"] = _bounded("logit_softcap", logit_softcap, scales)
    packed = ids.dim() == 1
    if packed:
        x, ids = x[None], ids[None]
        checked_mask = None if checked_mask is None else checked_mask[None]
        if isinstance(temperature, Tensor) and temperature.dim() == 1:
            temperature = floating("temperature", temperature)[None]
    rows = RowArguments(
        token_ids=saveable(ids.contiguous()),
        mask=None if checked_mask is None else saveable(checked_mask.contiguous()),
        ignore_index=ignored,
        temperatures=None,
        temperature=1.0,
        logit_scale=scale,
        logit_softcap=softcap,
    )
    if not isinstance(temperature, Tensor):
        return x, rows._replace(temperature=_bounded("temperature", temperature, scales))
    temperatures = _temperatures(temperature, rows, x.dtype, scales, packed=packed)
    return x, rows._replace(temperatures=temperatures)


def active_rows(rows: RowArguments, vocabulary: int) -> Tensor:
    """Return which rows are active, bool `[B, T]`; check the values of mask and ids on a CPU."""
    active = counted_rows(rows)
    check_ids(rows.token_ids, active, vocabulary)
    return active


def counted_rows(rows: RowArguments) -> Tensor:
    """Return which rows are active, bool `[B, T]`; check the values of the mask on a CPU."""
    active = rows.token_ids != rows.ignore_index
    if rows.mask is not None:
        active = active & as_mask("mask", rows.mask, rows.token_ids, "token_ids")
    return active


def check_ids(token_ids: Tensor, active: Tensor, vocabulary: int) -> None:
    """Raise on a CPU for an id of an active row that is outside the vocabulary."""
    if can_read(token_ids):
        invalid = active & ((token_ids < 0) | (token_ids >= vocabulary))
        if bool(invalid.any()):
            where = tuple(invalid.nonzero()[0].tolist())
            raise ValueError(
                f"token_ids must lie in [0, {vocabulary}) or be ignore_index, "
                f"got {int(token_ids[where])} at {where}"
            )


def _bounded(name: str, value: object, others: dict[str, float]) -> float:
    """Return a number above 0 if it and its quotients with the others are within `_MAX_SCALE`."""
    result = positive(name, value)
    low, high = _bounds(others)
    if not low <= result <= high:
        given = f" given {' and '.join(others)}" if others else ""
        raise ValueError(
            f"{name} must lie in [{low:g}, {high:g}]{given}, or float32 could overflow; "
            f"got {result}"
        )
    return result


def _bounds(others: dict[str, float]) -> tuple[float, float]:
    scales = (1.0, *others.values())
    return max(scales) / _MAX_SCALE, min(scales) * _MAX_SCALE


def _temperatures(
    given: Tensor, rows: RowArguments, dtype: torch.dtype, scales: dict[str, float], *, packed: bool
) -> Tensor:
    """Return a temperature per row, `[B, T]`."""
    floating("temperature", given)
    shape = tuple(rows.token_ids.shape)
    on_device("temperature", given, rows.token_ids, "token_ids")
    if given.requires_grad:
        raise ValueError("temperature must not require a gradient: none is computed for it")
    allowed: list[tuple[int, ...]] = [shape, ()]
    allowed += [] if packed else [shape[:1], (shape[0], 1)]
    if tuple(given.shape) not in allowed:
        expected, got = allowed, tuple(given.shape)
        if packed:
            expected, got = [shape[1:], ()], got[1:] if got[:1] == (1,) else got
        raise ValueError(
            f"temperature must be a float or have one of the shapes {expected}, got {got}"
        )
    column = given[:, None] if given.dim() == 1 else given
    real = torch.float64 if dtype == torch.float64 else torch.float32
    temperatures = saveable(column.to(real).expand(shape).contiguous())
    if can_read(temperatures):
        active = rows.token_ids != rows.ignore_index
        if rows.mask is not None:
            active = active & (rows.mask != 0)
        low, high = _bounds(scales)
        outside = active & ~((temperatures >= low) & (temperatures <= high))  # or NaN
        if bool(outside.any()):
            _bounded("temperature", float(temperatures[outside][0]), scales)
    return temperatures


def refuse_unsafe_inplace(name: str, logits: Tensor) -> None:
    """Raise if overwriting the logits with their gradient would destroy other values."""
    if logits.is_leaf and logits.requires_grad:
        raise ValueError(
            f"{name}=True needs logits that are not a leaf: the gradient would overwrite the "
            "values of the leaf"
        )
    base = logits._base
    if base is not None and base.is_leaf and base.requires_grad:
        raise ValueError(
            f"{name}=True needs logits that are not a view of a leaf: the gradient would overwrite "
            "the values of the leaf"
        )
    # a compiled graph never writes in place
    if not torch.compiler.is_compiling() and _rows_overlap(logits):
        raise ValueError(
            f"{name}=True needs logits whose rows do not share memory, got strides "
            f"{tuple(logits.stride())} for shape {tuple(logits.shape)}"
        )


def _rows_overlap(logits: Tensor) -> bool:
    """Return whether an element may belong to two rows: a stride is shorter than its contents."""
    span = 1
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride < span:
            return logits.numel() > 0
        span = max(span, stride * (size - 1) + span)
    return False
