"""Generalized advantage estimation: the recurrence, one step at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    terminated: Tensor | None,
    truncated: Tensor | None,
    bootstrap_values: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns `[B, T]`.

    The recurrence goes from the last token to the first, and skips masked tokens:
    delta_t = r_t + gamma V_next - V_t,  A_t = delta_t + gamma lam A_next.
    """
    tokens = rewards.shape[1]
    zero = rewards.new_zeros(())
    per_token = bootstrap_values is not None and bootstrap_values.dim() == 2
    last_of = {} if cu_seqlens is None or cu_seqlens.is_meta else _sequence_ends(cu_seqlens)

    next_advantage = next_value = rewards.new_zeros(rewards.shape[0])
    # whether no active token of the sequence follows
    at_end = torch.ones_like(mask[:, 0]) if tokens else mask.new_zeros(mask.shape[0])
    if bootstrap_values is not None and not per_token and cu_seqlens is None:
        next_value = bootstrap_values
    columns = []
    for t in reversed(range(tokens)):
        if t in last_of:
            sequence = last_of[t]
            next_advantage = torch.zeros_like(next_advantage)
            next_value = torch.zeros_like(next_value)
            at_end = torch.ones_like(at_end)
            if bootstrap_values is not None and not per_token:
                next_value = bootstrap_values[sequence].reshape(1)
        active = mask[:, t]
        value_after, trace = next_value, next_advantage
        if per_token:
            assert bootstrap_values is not None
            value_after = torch.where(at_end, bootstrap_values[:, t], value_after)
        if truncated is not None:
            cut = truncated[:, t]
            trace = torch.where(cut, zero, trace)
            if per_token:
                assert bootstrap_values is not None
                value_after = torch.where(cut, bootstrap_values[:, t], value_after)
        if terminated is not None:
            trace = torch.where(terminated[:, t], zero, trace)
            value_after = torch.where(terminated[:, t], zero, value_after)
        delta = rewards[:, t] + gamma * value_after - values[:, t]
        advantage = delta + gamma * lam * trace
        columns.append(torch.where(active, advantage, zero))
        next_advantage = torch.where(active, advantage, next_advantage)
        next_value = torch.where(active, values[:, t], next_value)
        at_end = at_end & ~active
    if not columns:
        return torch.zeros_like(rewards), torch.zeros_like(rewards)
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, torch.where(mask, advantages + values, zero)


def _sequence_ends(cu_seqlens: Tensor) -> dict[int, int]:
    """Map the position of each sequence's last token to the index of the sequence."""
    bounds = cu_seqlens.tolist()
    return {end - 1: s for s, (start, end) in enumerate(pairwise(bounds)) if end > start}
