"""verl's advantage estimators from returns, under verl's names: GAE, REINFORCE++ and ReMax.

Advantages and returns are `[B, T]` and 0 at masked tokens, whose rewards and values are ignored;
mask values other than 0 and 1 are factors, as in verl.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.integrations.verl.masks import (
    gae_with_factors,
    has_factors,
    returns_with_factors,
    whiten,
)


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Return whitened GAE advantages and returns `[B, T]`, skipping masked tokens.

    `gae` computes A_t = delta_t + gamma lam A_{t+1} (arXiv 1506.02438), and the advantages are (A -
    mean) / sqrt(var + 1e-8) over the mask. Mask values between 0 and 1 interpolate between a
    skipped and a counted token, as in verl.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl import compute_gae_advantage_return
        >>> rewards, mask = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[1, 0, 1]])
        >>> compute_gae_advantage_return(rewards, torch.zeros(1, 3), mask, 0.5, 1.0)[1]
        tensor([[0.5000, 0.0000, 1.0000]])
    """
    if has_factors(response_mask):
        return gae_with_factors(
            token_level_rewards, values, response_mask, float(gamma), float(lam)
        )
    result = fastrl.gae(
        token_level_rewards, values, response_mask, gamma=float(gamma), lam=float(lam)
    )
    return fastrl.whiten(result.advantages, response_mask), result.returns


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return REINFORCE++'s whitened returns, and the returns (arXiv 2501.03262).

    `discounted_returns` computes G_t = r_t + config.gamma G_{t+1}, and skips masked tokens.

    Examples:
        >>> import types, torch
        >>> from fastrl.integrations.verl.advantages import (
        ...     compute_reinforce_plus_plus_outcome_advantage as reinforce_plus_plus,
        ... )
        >>> rewards, mask = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[1, 0, 1]])
        >>> advantages, returns = reinforce_plus_plus(
        ...     rewards, mask, types.SimpleNamespace(gamma=0.5)
        ... )
        >>> returns
        tensor([[0.5000, 0.0000, 1.0000]])
    """
    del kwargs
    if config is None:
        raise TypeError("config must be verl's AlgoConfig, got None")
    gamma = float(config.gamma)
    if has_factors(response_mask):
        returns = returns_with_factors(token_level_rewards, response_mask, gamma)
    else:
        returns = fastrl.discounted_returns(token_level_rewards, response_mask, gamma=gamma)
    return whiten(returns, response_mask) * response_mask, returns


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return ReMax's advantages G_t - b, and the returns G_t (arXiv 2310.10505).

    G_t is the sum of the rewards from t on, and b `[B]` is the reward of the greedy response. verl
    also returns the G_t of masked tokens; here they are 0.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl.advantages import compute_remax_outcome_advantage
        >>> rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 1]])
        >>> compute_remax_outcome_advantage(rewards, torch.tensor([0.25]), mask)[0]
        tensor([[0.7500, 0.0000, 0.7500]])
    """
    del config, kwargs  # verl does not read them either
    valid = response_mask.bool()
    weighed = torch.where(valid, token_level_rewards, 0.0) * response_mask
    returns = fastrl.discounted_returns(weighed, valid, gamma=1.0)
    advantages = returns - reward_baselines[:, None] * response_mask
    return torch.where(valid, advantages, 0.0), returns
