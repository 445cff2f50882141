"""Samples of this rank's part of the vocabulary, which distinguish it from a copy of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastrl.ops._vocabulary_parts.parts import local_part

#: Most samples of a call: of the student and of the teacher.
MOST = 2
#: About how many columns of a row of logits, and how many rows and columns of a head, are compared.
_LOGITS, _ROWS, _FEATURES = 1024, 8, 128
#: How many finite values of a sample must differ: zeros or NaN may be the same in all parts.
_DISTINCT = 8


def samples(given: Mapping[str, Any], active: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return values of each split tensor, float64 `[M]`, and whether they distinguish its parts.

    The values of logits are from the first row that is `active`, bool `[B, T]` or `[N]`.
    """
    split = {name: given.get(name) for name in ("logits", "weight")}
    teacher = given.get("teacher")
    if teacher is not None:
        split |= {"teacher.logits": teacher.logits, "teacher.weight": teacher.weight}
    found = {}
    for name, value in split.items():
        if value is None:
            continue
        part = local_part(value).detach()
        known = torch.ones((), dtype=torch.bool, device=active.device)
        if name.endswith("weight"):
            some = _spread(_spread(part, 0, _ROWS), 1, _FEATURES)
        elif active.numel():
            first = active.reshape(-1).int().argmax()[None]  # indices of [1] leave the host alone
            row = (first,) if part.dim() == 2 else (first // part.shape[1], first % part.shape[1])
            some, known = _spread(part, -1, _LOGITS)[row], active.any()
        else:
            some = part[:0]
        values = some.reshape(-1).to(torch.float64)
        found[name] = values, known & _tells(values)
    return found


def _spread(x: Tensor, dim: int, count: int) -> Tensor:
    """Return about `count` evenly spread entries in a dimension."""
    step = max(1, x.shape[dim] // count)
    return x[(slice(None),) * (dim % x.dim()) + (slice(None, None, step),)]


def _tells(values: Tensor) -> Tensor:
    """Return whether these values cannot be in another part of the vocabulary by coincidence."""
    finite = torch.where(values.isfinite(), values, float("inf")).sort().values
    steps = (finite.diff() != 0) & finite[1:].isfinite()
    return steps.sum() >= _DISTINCT - 1
