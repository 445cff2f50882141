"""Passes over logits, in blocks of rows that stay in a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.tracing import is_traced

#: Bytes of a block: of what one thread of a CPU works on, and on any other device.
_CPU_BYTES, _OTHER_BYTES = 2**22, 2**26

Index = tuple[slice, slice]
Memory = tuple[Tensor | None, Tensor | None]
EVERYTHING: Index = (slice(None), slice(None))


class Block(NamedTuple):
    """Some of the rows `[B, T]`, and their logits in the dtype of the arithmetic; 0 if inactive.

    Without active rows there are no logits. Results of their size go to `memory`, which is the same
    for all blocks; None lets torch allocate it.
    """

    place: Index
    logits: Tensor | None
    memory: Memory


def arithmetic_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype of statistics: float64 for float64, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def is_recorded(x: Tensor) -> bool:
    """Return whether torch traces, transforms or differentiates what happens to a tensor.

    There are then no values to read, and results cannot be written to given memory.
    """
    return is_traced(x) or (torch.is_grad_enabled() and x.requires_grad)


def readable(x: Tensor) -> bool:
    """Return whether a decision may depend on values: they are there, and no GPU is waited for."""
    return x.device.type == "cpu" and not is_recorded(x)


def unless_all(active: Tensor) -> Tensor | None:
    """Return which rows are active, or None if all are known to be."""
    return None if readable(active) and bool(active.all()) else active


def blocks(logits: Tensor, active: Tensor | None) -> Iterator[Block]:
    """Yield the blocks of logits `[B, T, V]`; the place of a single one is `EVERYTHING`."""
    dtype = arithmetic_dtype(logits)
    B, T, V = logits.shape
    rows = B * T if is_recorded(logits) else _rows_of_block(logits, dtype)
    if rows >= B * T:
        x = logits.to(dtype)
        yield Block(EVERYTHING, without_inactive(x, active), (None, None))
        return
    tokens = min(rows, T)
    sequences = rows // tokens
    memory = [logits.new_empty(sequences * tokens * V, dtype=dtype) for _ in range(2)]
    for b in range(0, B, sequences):
        for t in range(0, T, tokens):
            index = slice(b, b + sequences), slice(t, t + tokens)
            x = logits[index].to(dtype)
            first, second = (whole[: x.numel()].view(x.shape) for whole in memory)
            chosen = None if active is None else active[index]
            yield Block(index, without_inactive(x, chosen), (first, second))


def _rows_of_block(logits: Tensor, dtype: torch.dtype) -> int:
    on_cpu = logits.device.type == "cpu"
    size = _CPU_BYTES * torch.get_num_threads() if on_cpu else _OTHER_BYTES
    return max(1, size // (logits.shape[-1] * dtype.itemsize))


def without_inactive(logits: Tensor, active: Tensor | None) -> Tensor | None:
    """Replace inactive rows by 0; return None if there are no others."""
    if active is None:
        return logits
    if readable(active):
        if bool(active.all()):
            return logits
        if not bool(active.any()):
            return None
    return torch.where(active[..., None], logits, 0.0)
