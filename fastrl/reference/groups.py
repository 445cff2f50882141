"""Sums over groups that ids name, in any order."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_index(group_ids: Tensor) -> Tensor:
    """Number the groups 0, 1, ... in the order of their ids, without asking how many there are."""
    ordered, order = group_ids.sort(stable=True)
    starts = torch.cat([torch.zeros_like(ordered[:1]), (ordered.diff() != 0).to(ordered.dtype)])
    return torch.empty_like(starts).scatter(0, order, starts.cumsum(0))


def group_sum(x: Tensor, index: Tensor) -> Tensor:
    """Give each member the sum over its group, whose number `index` holds."""
    return torch.zeros_like(x).index_add(0, index, x)[index]
