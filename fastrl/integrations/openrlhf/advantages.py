"""OpenRLHF's advantages and returns."""

from __future__ import annotations

import torch
from torch import Tensor

import fastrl


def get_advantages_and_returns(
    values: Tensor,
    rewards: Tensor,
    action_mask: Tensor | None,
    gamma: float,
    lambd: float,
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of OpenRLHF's experience maker, by `gae`.

    Masked tokens count as steps with reward 0 and value 0, while `gae` with a mask (and verl)
    skips them: the results differ if a mask has gaps.

    Args:
        values: `[B, T]`.
        rewards: `[B, T]`.
        action_mask: 0/1, `[B, T]`; None means all ones.
        gamma: discount per token, in [0, 1].
        lambd: trace decay per token, in [0, 1].

    Returns:
        Advantages and returns, fp32 `[B, T]`, without gradient.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `values` and `rewards` differ in shape, or gamma or lambd is outside [0, 1].

    Examples:
        >>> import torch
        >>> from fastrl.integrations.openrlhf import get_advantages_and_returns
        >>> rewards, mask = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[1, 0, 1]])
        >>> get_advantages_and_returns(torch.zeros(1, 3), rewards, mask, 0.5, 1.0)[1]
        tensor([[0.2500, 0.5000, 1.0000]])
    """
    if action_mask is not None:
        values, rewards = (torch.where(action_mask.bool(), x, 0.0) for x in (values, rewards))
    found = fastrl.gae(rewards, values, gamma=float(gamma), lam=float(lambd))
    return found.advantages, found.returns
