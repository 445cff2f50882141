"""Group-relative advantages: GRPO, Dr. GRPO, RLOO, MaxRL."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.reference.groups import dense_index, group_sum


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
    """Return the fields of `GroupAdvantages`, `[N]` each.

    Mean and variance are computed in two passes in float64, so that the variance of nearly equal
    rewards is accurate. A non-finite reward affects only its group. A centered reward of 0 gives
    advantage 0, even if the standard deviation is 0, too.
    """
    if rewards.numel() == 0:
        return rewards, rewards.clone(), rewards.clone(), rewards.to(torch.bool)
    x = rewards.double()
    group = dense_index(group_ids)
    size = group_sum(torch.ones_like(x), group)
    mean = group_sum(x, group) / size
    std = _std(group_sum((x - mean).square(), group), size - correction)
    lowest = x.new_zeros(x.shape).scatter_reduce(0, group, x, "amin", include_self=False)[group]
    highest = x.new_zeros(x.shape).scatter_reduce(0, group, x, "amax", include_self=False)[group]
    spread = lowest != highest
    alone, finite = size == 1, mean.isfinite()

    advantages = x
    if baseline != "none":
        advantages = torch.where(spread | ~finite, x - mean, 0.0)
        if baseline == "leave_one_out":
            advantages = advantages * size / (size - 1).clamp(min=1)
    divisor: Tensor | float = 1.0
    if scale == "group":
        divisor = std + eps
    elif scale == "mean":
        divisor = mean + eps
    elif scale == "batch":
        count = finite.sum()
        batch_mean = torch.where(finite, x, 0.0).sum() / count.clamp(min=1)
        squares = torch.where(finite, (x - batch_mean).square(), 0.0).sum()
        divisor = _std(squares, count - correction) + eps
    advantages = torch.where((advantages == 0) & finite, 0.0, advantages / divisor)
    advantages = torch.where(alone, x if singleton == "raw" else 0.0 * x, advantages)
    informative = spread | (alone if singleton == "raw" else torch.zeros_like(alone))
    return (
        advantages.to(rewards.dtype),
        mean.to(rewards.dtype),
        std.to(rewards.dtype),
        informative & finite,
    )


def _std(squares: Tensor, freedom: Tensor) -> Tensor:
    """Return the square root of the variance; 0 without degrees of freedom."""
    return torch.where(freedom > 0, squares / freedom.clamp(min=1e-9), 0.0 * squares).sqrt()
