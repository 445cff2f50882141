"""The reward of each response `[B]`, and sums over the group of responses that `index` names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.integrations.replacing import described_by
from fastrl.integrations.verl.masks import whiten

#: advantages and returns
Estimate = tuple[Tensor, Tensor]


#: a score of each response from its reward, the groups and the mask
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_group(
    finish: Callable[[Tensor, Tensor], Estimate],
) -> Callable[[Score], Callable[..., Estimate]]:
    """Turn a score into verl's estimator, which finishes it with the mask."""

    def decorated(score: Score) -> Callable[..., Estimate]:
        def compute(
            token_level_rewards: Tensor,
            response_mask: Tensor,
            index: Iterable[Any],
            epsilon: float = 1e-6,
            config: Any = None,
            **kwargs: Any,
        ) -> Estimate:
            del epsilon, config, kwargs  # verl does not read them either
            rewards = outcomes(token_level_rewards, response_mask)
            groups = group_ids(index, response_mask)
            return finish(score(rewards, groups, response_mask), response_mask)

        return described_by(score, compute)

    return decorated


def outcomes(token_level_rewards: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of each response's rewards; rewards of masked tokens count, as in verl.

    A NaN at a masked token counts as 0.
    """
    total = token_level_rewards.sum(-1)
    if not bool(total.isnan().any()):
        return total
    counts = mask.bool() | ~token_level_rewards.isnan()
    return torch.where(counts, token_level_rewards, 0.0).sum(-1)


def group_ids(index: Iterable[Any], like: Tensor) -> Tensor:
    """Return the index of each response's group, below B, from names of any hashable type."""
    numbers: dict[Any, int] = {}
    names = index.tolist() if hasattr(index, "tolist") else index
    ids = [numbers.setdefault(name, len(numbers)) for name in names]
    return torch.tensor(ids, dtype=torch.int64, device=like.device)


def group_sum(x: Tensor, groups: Tensor) -> Tensor:
    """Return for each response the sum over its group."""
    return torch.zeros_like(x).index_add(0, groups, x)[groups]


def group_max(x: Tensor, groups: Tensor) -> Tensor:
    """Return for each response the largest value of its group."""
    return torch.full_like(x, -inf).scatter_reduce(0, groups, x, "amax")[groups]


def alone(groups: Tensor) -> Tensor:
    """Return which responses are a group of one."""
    return group_sum(torch.ones_like(groups), groups) == 1


def centred(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return r - mean of the group, and r in a group of one."""
    return fastrl.group_advantages(
        rewards, group_ids=groups, scale="none", singleton="raw"
    ).advantages


def times_mask(scores: Tensor, mask: Tensor) -> Estimate:
    """Return the advantage of each response times its mask, `[B, T]`, twice."""
    scores = scores[:, None]
    if not bool(scores.isfinite().all()):  # NaN times a mask of 0 is NaN
        scores = torch.where(mask.bool(), scores, 0.0)
    advantages = scores * mask
    return advantages, advantages


def whitened_times_mask(scores: Tensor, mask: Tensor) -> Estimate:
    """Return `times_mask`, whitened over the tokens and multiplied by the mask again."""
    advantages = whiten(times_mask(scores, mask)[0], mask) * mask
    return advantages, advantages
