"""Generalized advantage estimation: the recurrence, one step at a time."""

from __future__ import annotations

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

    The recurrence goes from the last token to the first, in all sequences at once, and skips masked
    tokens: delta_t = r_t + gamma V_next - V_t,  A_t = delta_t + gamma lam A_next.
    """
    if rewards.is_meta:
        return torch.empty_like(rewards), torch.empty_like(rewards)
    order, last, counts = _longest_first(rewards, cu_seqlens)
    zero, shape = rewards.new_zeros(()), rewards.shape
    rewards, values, mask = rewards.flatten(), values.flatten(), mask.flatten()
    terminated, truncated = (None if x is None else x.flatten() for x in (terminated, truncated))
    next_advantage = next_value = rewards.new_zeros(len(last))
    of_token = None
    if bootstrap_values is not None:
        if bootstrap_values.dim() == 2:
            of_token = bootstrap_values.flatten()
        else:
            next_value = bootstrap_values[order]
    # whether no active token of the sequence follows
    at_end = torch.ones_like(last, dtype=torch.bool)
    places, columns = [last[:0]], [rewards[:0]]
    for step, count in enumerate(counts):
        t = last[:count] - step
        active, value = mask[t], values[t]
        trace, value_after, at_end = next_advantage[:count], next_value[:count], at_end[:count]
        if of_token is not None:
            value_after = torch.where(at_end, of_token[t], value_after)
        if truncated is not None:
            cut = truncated[t]
            trace = torch.where(cut, zero, trace)
            if of_token is not None:
                value_after = torch.where(cut, of_token[t], value_after)
        if terminated is not None:
            done = terminated[t]
            trace = torch.where(done, zero, trace)
            value_after = torch.where(done, zero, value_after)
        delta = rewards[t] + gamma * value_after - value
        advantage = delta + gamma * lam * trace
        places.append(t)
        columns.append(torch.where(active, advantage, zero))
        next_advantage = torch.where(active, advantage, next_advantage[:count])
        next_value = torch.where(active, value, next_value[:count])
        at_end = at_end & ~active
    advantages = torch.zeros_like(rewards).index_put((torch.cat(places),), torch.cat(columns))
    returns = torch.where(mask, advantages + values, zero)
    return advantages.view(shape), returns.view(shape)


def _longest_first(rewards: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, list[int]]:
    """Return the sequences, their last tokens, and how many sequences have a token at each step."""
    if cu_seqlens is None:
        sequences, tokens = rewards.shape
        order = torch.arange(sequences, device=rewards.device)
        return order, (order + 1) * tokens - 1, [sequences] * tokens
    lengths, order = cu_seqlens.diff().sort(descending=True)
    over = lengths.bincount().cumsum(0)  # how many have at most so many tokens
    return order, cu_seqlens[1:][order].long() - 1, (len(order) - over).tolist()[:-1]
