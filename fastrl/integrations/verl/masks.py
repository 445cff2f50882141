"""Masks of verl, which are factors, since their values may differ from 0 and 1."""

from __future__ import annotations

import torch
from torch import Tensor

import fastrl

#: The term that verl adds to a sum of mask values before it divides by the sum.
_EPSILON = 1e-8


def has_factors(mask: Tensor) -> bool:
    """Return whether a mask holds values other than 0 and 1.

    On a GPU this synchronizes, and only floating-point masks are checked.
    """
    checked = _on_the_host(mask) or mask.is_floating_point()
    if mask.dtype == torch.bool or not checked or torch.compiler.is_compiling():
        return False
    return bool(((mask != 0) & (mask != 1)).any())


def factors(mask: Tensor) -> Tensor | None:
    """Return the values of a mask as factors of the tokens, or None if they are known to be 0/1.

    On a GPU the values are not read, so every mask that is not bool gives factors.
    """
    if mask.dtype == torch.bool or (_on_the_host(mask) and not has_factors(mask)):
        return None
    return mask if mask.dtype == torch.float64 else mask.float()


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return sum_t m_t x_t / sum_t m_t over one dimension or all; x is ignored where m is 0.

    Examples:
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
    weights, valid = mask.to(values.dtype), mask.bool()
    rewards, values = (torch.where(valid, x, 0.0) for x in (rewards, values))
    after = trace = torch.zeros_like(values[:, 0])
    found = []
    for t in reversed(range(values.shape[1])):
        step = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * trace
        trace = trace.lerp(step, weights[:, t])
        after = after.lerp(values[:, t], weights[:, t])
        found.append(trace)
    advantages = torch.stack(found[::-1], dim=1)
    returns = torch.where(valid, advantages + values, 0.0)
    return whiten(advantages, mask), returns


def returns_with_factors(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return verl's discounted returns for mask values m between 0 and 1.

    They are m_t G_t with G_t = r_t + gamma H_{t+1} and H_t = m_t G_t + (1 - m_t) H_{t+1}.
    """
    weights, valid = mask.to(rewards.dtype), mask.bool()
    given = torch.where(valid, rewards, 0.0)
    after = torch.zeros_like(rewards[:, 0])
    found = []
    for t in reversed(range(rewards.shape[1])):
        step = given[:, t] + gamma * after
        after = after.lerp(step, weights[:, t])
        found.append(step)
    return torch.stack(found[::-1], dim=1) * weights


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) over the mask, 0 where it is 0; as `fastrl.whiten`.

    With mask values m, mean and variance are sums of m_t x_t, and the variance is multiplied by
    n / (n - 1) for n = sum m_t, as in verl.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl.masks import whiten
        >>> whiten(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.5, 1.5, 0.0]))
        tensor([-0.8165,  0.8165,  0.0000])
    """
    if not has_factors(mask):
        return fastrl.whiten(x, mask)
    count, mean = mask.to(x.dtype).sum(), masked_mean(x, mask)
    variance = masked_mean((x - mean).square(), mask) * count / (count - 1)
    return torch.where(mask.bool(), (x - mean) * (variance + _EPSILON).rsqrt(), 0.0)


def _on_the_host(mask: Tensor) -> bool:
    return mask.device.type == "cpu" and not torch.compiler.is_compiling()
