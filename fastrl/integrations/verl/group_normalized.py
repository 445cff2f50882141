"""verl's advantage estimators that divide by the spread of a group: GRPO, GDPO and pass@k.

A response's reward r is the sum of its token rewards (NaN at a masked token counts as 0), and
`index` names its group. All return `[B, T]` twice: the advantage of the response times its mask.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.integrations.verl.outcomes import (
    Estimate,
    alone,
    centred,
    group_ids,
    group_max,
    group_sum,
    outcomes,
    times_mask,
    whitened_times_mask,
)


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Any],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Estimate:
    """Return GRPO's advantage of each response, times its mask (arXiv 2402.03300).

        (r - mean) / (std + epsilon)

    Mean and std are over the group of the response, and r is the sum of its rewards. A group of one
    has mean 0 and std 1.

    Args:
        token_level_rewards: `[B, T]`.
        response_mask: 0/1, `[B, T]`; other values are factors.
        index: the group of each response, B names of any hashable type.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation; False is Dr. GRPO
            (arXiv 2503.20783).
        config: ignored, as in verl.

    Returns:
        The same tensor twice, as advantages and returns, fp32 `[B, T]`, 0 at masked tokens.

    Raises:
        ValueError: `index` has another length than the mask.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl import compute_grpo_outcome_advantage
        >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
        >>> compute_grpo_outcome_advantage(rewards, mask, ["a", "a"])[0]
        tensor([[ 0.7071,  0.7071],
                [-0.7071, -0.7071]])
    """
    del config  # verl does not read it either
    rewards = outcomes(token_level_rewards, response_mask)
    groups = group_ids(index, response_mask)
    return times_mask(_normalized(rewards, groups, epsilon, norm_adv_by_std_in_grpo), response_mask)


@functools.wraps(compute_grpo_outcome_advantage, assigned=())
def compute_grpo_vectorized_outcome_advantage(*given: Any, **options: Any) -> Estimate:
    """Return `compute_grpo_outcome_advantage`, which is already vectorized."""
    return compute_grpo_outcome_advantage(*given, **options)


def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Any],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Any = None,
    **kwargs: Any,
) -> Estimate:
    """Return GDPO's whitened sum_k w_k (r_k - mean_k) / (std_k + epsilon) (arXiv 2601.05242).

    The rewards r_k are `non_tensor_batch[key]` for the keys in `config.gdpo_reward_keys`, and the
    weights w_k are `config.gdpo_reward_weights`, by default 1. Without `config`, `non_tensor_batch`
    or `batch`, there is one reward, the sum of the token rewards.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl.group_normalized import compute_gdpo_outcome_advantage
        >>> config = {"gdpo_reward_keys": ["format", "answer"]}
        >>> batch = {"format": [0.0, 1.0], "answer": [0.0, 100.0]}
        >>> mask, names = torch.tensor([[1, 1], [1, 0]]), ["a", "a"]
        >>> compute_gdpo_outcome_advantage(
        ...     torch.zeros(2, 2), mask, names, config=config, non_tensor_batch=batch, batch={}
        ... )[0]
        tensor([[-0.5774, -0.5774],
                [ 1.1547,  0.0000]])
    """
    del kwargs
    groups = group_ids(index, response_mask)
    components, weights = [outcomes(token_level_rewards, response_mask)], None
    if config is not None and non_tensor_batch is not None and batch is not None:
        components = _components(config, non_tensor_batch, token_level_rewards)
        weights = config.get("gdpo_reward_weights", None)
    weights = [1.0] * len(components) if weights is None else list(weights)
    if len(weights) != len(components):
        raise ValueError(
            f"gdpo_reward_weights must have {len(components)} entries, one for each reward, "
            f"got {len(weights)}"
        )
    total = sum(
        weight * _normalized(rewards, groups, epsilon, norm_adv_by_std_in_grpo)
        for weight, rewards in zip(weights, components, strict=True)
    )
    return whitened_times_mask(total, response_mask)


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Any],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Estimate:
    """Return the best reward of a group minus the second, for the best response (arXiv 2503.19595).

    All other responses, and responses that share the best reward, get 0.
    `config.norm_adv_by_std_in_grpo` tells whether to divide by std + epsilon; the argument of that
    name is ignored, as in verl.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl.group_normalized import (
        ...     compute_grpo_passk_outcome_advantage as passk,
        ... )
        >>> config, names = {"norm_adv_by_std_in_grpo": False}, ["a", "a", "a"]
        >>> passk(torch.tensor([[0.5], [3.0], [2.0]]), torch.ones(3, 1), names, config=config)[0].T
        tensor([[0., 1., 0.]])
    """
    del norm_adv_by_std_in_grpo, kwargs
    if config is None:
        raise TypeError("config must be verl's AlgoConfig, got None")
    rewards = outcomes(token_level_rewards, response_mask)
    groups = group_ids(index, response_mask)
    if bool(alone(groups).any()):
        raise ValueError("index must have groups of at least 2 responses for pass@k, got one of 1")
    best = group_max(rewards, groups)
    first = rewards == best
    shared = group_sum(first.to(rewards.dtype), groups) > 1
    second = group_max(torch.where(first, -inf, rewards), groups)
    gain = torch.where(first & ~shared, best - second, 0.0)
    gain = torch.where(best.isnan(), best, gain)  # a NaN reward must not pass unnoticed
    if config.get("norm_adv_by_std_in_grpo", True):
        gain = gain / (fastrl.group_advantages(rewards, group_ids=groups).std + epsilon)
    return times_mask(gain, response_mask)


def _components(config: Any, given: Mapping[str, Any], like: Tensor) -> list[Tensor]:
    """Return GDPO's rewards, `[B]` each."""
    keys = config.get("gdpo_reward_keys", None)
    if not keys:
        raise ValueError("config.gdpo_reward_keys must name the rewards of GDPO, got none")
    missing = [key for key in keys if key not in given]
    if missing:
        raise ValueError(
            f"config.gdpo_reward_keys must be in non_tensor_batch ({', '.join(given)}), "
            f"got {', '.join(missing)}"
        )
    return [
        torch.tensor(
            [nan if x is None else float(x) for x in given[key]],
            dtype=torch.float32,
            device=like.device,
        )
        for key in keys
    ]


def _normalized(rewards: Tensor, groups: Tensor, epsilon: float, by_std: bool) -> Tensor:
    if not by_std:
        return centred(rewards, groups)
    advantages = fastrl.group_advantages(
        rewards, group_ids=groups, eps=epsilon, singleton="raw"
    ).advantages
    return torch.where(alone(groups), advantages / (1 + epsilon), advantages)
