"""Advantages of rewards relative to their group: GRPO, Dr. GRPO, RLOO."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: str,
    scale: str,
    correction: float,
    eps: float,
    singleton: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return advantages, mean, std and informative of the group of each reward, all `[N]`.

    Mean and variance take two passes in float64, so rewards that differ in the fifth digit keep
    their spread. What is not finite stays in its group.
    """
    if rewards.numel() == 0:
        return rewards, rewards.clone(), rewards.clone(), rewards.to(torch.bool)
    x = rewards.double()
    group = _dense_index(group_ids)
    size = _group_sum(torch.ones_like(x), group)
    mean = _group_sum(x, group) / size
    std = _std(_group_sum((x - mean).square(), group), size - correction)
    lowest = x.new_zeros(x.shape).scatter_reduce(0, group, x, "amin", include_self=False)[group]
    highest = x.new_zeros(x.shape).scatter_reduce(0, group, x, "amax", include_self=False)[group]
    spread = lowest != highest
    alone = size == 1

    if baseline == "none":
        advantages = x
    else:
        advantages = x - mean
        if baseline == "leave_one_out":
            advantages = advantages * size / (size - 1).clamp(min=1)
    if scale == "group":
        advantages = advantages / (std + eps)
    elif scale == "batch":
        known = mean.isfinite()
        count = known.sum()
        batch_mean = torch.where(known, x, 0.0).sum() / count.clamp(min=1)
        squares = torch.where(known, (x - batch_mean).square(), 0.0).sum()
        advantages = advantages / (_std(squares, count - correction) + eps)
    if baseline != "none":  # also where eps is 0 and nothing divides
        advantages = torch.where(spread | ~mean.isfinite(), advantages, 0.0)
    advantages = torch.where(alone, x if singleton == "raw" else 0.0 * x, advantages)
    informative = spread | (alone if singleton == "raw" else torch.zeros_like(alone))
    return (
        advantages.to(rewards.dtype),
        mean.to(rewards.dtype),
        std.to(rewards.dtype),
        informative & mean.isfinite(),
    )


def _dense_index(group_ids: Tensor) -> Tensor:
    """Number the groups 0, 1, ... in the order of their ids, without asking how many there are."""
    ordered, order = group_ids.sort(stable=True)
    starts = torch.cat([ordered.new_zeros(1, dtype=torch.int64), (ordered.diff() != 0).long()])
    return torch.empty_like(starts).scatter(0, order, starts.cumsum(0))


def _group_sum(x: Tensor, group: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, group, x)[group]


def _std(squares: Tensor, freedom: Tensor) -> Tensor:
    """Square root of the variance; 0 where no degree of freedom is left."""
    return torch.where(freedom > 0, squares / freedom.clamp(min=1e-9), 0.0 * squares).sqrt()
