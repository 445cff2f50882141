"""verl's advantage estimators with a baseline from the group: RLOO, REINFORCE++, OPO and GPG.

A response's reward r is the sum of its token rewards (NaN at a masked token counts as 0), and
`index` names its group. All return `[B, T]` twice: the advantage of the response times its mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

import fastrl
from fastrl.integrations.verl.outcomes import (
    Estimate,
    alone,
    by_group,
    centred,
    group_ids,
    group_sum,
    outcomes,
    times_mask,
    whitened_times_mask,
)


@by_group(whitened_times_mask)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    rewards: Tensor, groups: Tensor, mask: Tensor
) -> Tensor:
    """Return REINFORCE++-baseline: r - mean of the group, whitened over tokens (2501.03262)."""
    return centred(rewards, groups)


@by_group(times_mask)
def compute_rloo_outcome_advantage(rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Return RLOO's r - mean of the others in the group (arXiv 2402.14740); r in a group of one.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl.group_baselines import compute_rloo_outcome_advantage
        >>> rewards = torch.tensor([[1.0], [0.0], [0.5], [7.0]])
        >>> names = ["a", "a", "a", "alone"]
        >>> compute_rloo_outcome_advantage(rewards, torch.ones(4, 1), names)[0].T
        tensor([[ 0.7500, -0.7500,  0.0000,  7.0000]])
    """
    return _leave_one_out(rewards, groups, "raw")


@by_group(times_mask)
def compute_rloo_vectorized_outcome_advantage(
    rewards: Tensor, groups: Tensor, mask: Tensor
) -> Tensor:
    """Return `compute_rloo_outcome_advantage`, except that a group of one has 0, as in verl."""
    return _leave_one_out(rewards, groups, "zero")


@by_group(times_mask)
def compute_opo_outcome_advantage(rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Return OPO's r - sum(length r) / sum(length) over the group (arXiv 2505.23585).

    A length is the sum of a response's mask; a group of one has r.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl.group_baselines import compute_opo_outcome_advantage
        >>> rewards, mask = torch.tensor([[0.0, 1.0], [4.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
        >>> compute_opo_outcome_advantage(rewards, mask, ["a", "a"])[0]
        tensor([[-1., -1.],
                [ 2.,  0.]])
    """
    # from centered rewards, so that equal rewards give exactly 0
    deviations, lengths = centred(rewards, groups).double(), mask.double().sum(-1)
    shift = group_sum(lengths * deviations, groups) / group_sum(lengths, groups)
    return torch.where(alone(groups), rewards, (deviations - shift).to(rewards.dtype))


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Any],
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Estimate:
    """Return GPG's alpha (r - mean of the group) / f_norm (arXiv 2504.02546).

    alpha is the number of responses divided by the number of responses with r != 0; the argument
    `alpha` is ignored, as in verl.
    """
    del epsilon, alpha, config, kwargs
    rewards = outcomes(token_level_rewards, response_mask)
    scale = len(rewards) / rewards.count_nonzero().clamp(min=1).to(rewards.dtype)
    deviations = centred(rewards, group_ids(index, response_mask))
    return times_mask(scale * deviations / f_norm, response_mask)


def _leave_one_out(rewards: Tensor, groups: Tensor, singleton: Literal["raw", "zero"]) -> Tensor:
    return fastrl.group_advantages(
        rewards,
        group_ids=groups,
        baseline="leave_one_out",
        scale="none",
        singleton=singleton,
    ).advantages
