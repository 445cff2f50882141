"""Masks in verl, which multiplies by their values: these may differ from 0 and 1."""

from __future__ import annotations

import torch
from torch import Tensor

import fastrl

#: What verl adds to a sum of mask values before it divides by it.
_EPSILON = 1e-8


def has_factors(mask: Tensor) -> bool:
    """Say whether a mask holds values other than 0 and 1.

    On a GPU this synchronizes, and only floating-point masks are checked.
    """
    checked = _on_the_host(mask) or mask.is_floating_point()
    if mask.dtype == torch.bool or not checked or torch.compiler.is_compiling():
        return False
    return bool(((mask != 0) & (mask != 1)).any())


def factors(mask: Tensor) -> Tensor | None:
    """Return the values of a mask as factors of the tokens, or None if they are known to be 0/1.

    On a GPU the values are not read: every mask that is not bool gives factors.
    """
    if mask.dtype == torch.bool or (_on_the_host(mask) and not has_factors(mask)):
        return None
    return mask if mask.dtype == torch.float64 else mask.float()


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return sum_t m_t x_t / sum_t m_t over one dimension or all; x is ignored where m is 0.

    Example:
        >>> import torch
        >>> from fastrl.integrations.verl.masks import masked_mean
        >>> masked_mean(torch.tensor([1.0, 5.0]), torch.tensor([1.5, 0.5]))
        tensor(2.)
    """
    weights = factors(mask)
    if weights is None:
        return fastrl.masked_mean(x, mask, dim=dim)
    total = (weights * torch.where(mask.bool(), x, 0.0)).sum(dim)
    return total / (weights.sum(dim) + _EPSILON)


def gae_with_factors(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return verl's whitened GAE advantages and returns for mask values m between 0 and 1.

    A_t = m_t (delta_t + gamma lam A_{t+1}) + (1 - m_t) A_{t+1}. The next value, in delta_{t-1}, is
    W_t = m_t V_t + (1 - m_t) W_{t+1}.
    """
    weights = mask.to(values.dtype)
    after = trace = torch.zeros_like(values[:, 0])
    found = []
    for t in reversed(range(values.shape[1])):
        step = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * trace
        trace = trace.lerp(step, weights[:, t])
        after = after.lerp(values[:, t], weights[:, t])
        found.append(trace)
    advantages = torch.stack(found[::-1], dim=1)
    count = weights.sum()
    mean = masked_mean(advantages, mask)
    variance = masked_mean((advantages - mean).square(), mask) * count / (count - 1)
    white = (advantages - mean) * (variance + _EPSILON).rsqrt()
    valid = mask.bool()
    return torch.where(valid, white, 0.0), torch.where(valid, advantages + values, 0.0)


def _on_the_host(mask: Tensor) -> bool:
    return mask.device.type == "cpu" and not torch.compiler.is_compiling()
