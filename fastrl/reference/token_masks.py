"""Tokens to drop from the policy term: far from the old policy, or with low entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.objective.trust_region import TrustRegion
from fastrl.reference.objectives import difference, saturate
from fastrl.reference.sequences import Sequences


def off_policy(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    threshold: float,
) -> Tensor:
    """Return which tokens have A < 0 in a sequence with mean(sampled - current) > threshold.

    From DeepSeek-V3.2 (arXiv 2512.02556): negative samples that the current policy would hardly
    produce do not help. NaN differences count as 0, as in TRL.
    """
    gap = difference(sampled_logprobs, logprobs.detach())
    drift = sequences.mean(torch.where(gap.isnan(), 0.0, gap), mask)
    return mask & (advantages < 0) & (drift > threshold)


def outside_trust_region(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, region: TrustRegion
) -> Tensor:
    """Return which tokens a `TrustRegion` drops."""
    logprobs = logprobs.detach()
    log_ratio = saturate(difference(logprobs, old_logprobs))
    up = mask & (advantages > 0) & (log_ratio > 0)
    down = mask & (advantages < 0) & (log_ratio < 0)
    if region.kind == "m2":
        return _largest_squares(log_ratio, up | down, region.high)
    # rounding can make a log-probability positive
    logprobs, old_logprobs = (x.clamp(max=0.0) for x in (logprobs, old_logprobs))
    old = old_logprobs.exp()
    if region.kind == "tv":
        distance = (logprobs.exp() - old).abs()
    else:
        others, old_others = (1e-8 - torch.expm1(x) for x in (logprobs, old_logprobs))
        log_ratio = saturate(difference(logprobs, old_logprobs))
        distance = (1 - old) * (old_others / others).log() - old * log_ratio
    low = region.high if region.low is None else region.low
    return up & (distance > region.high) | down & (distance > low)


def _largest_squares(x: Tensor, among: Tensor, bound: float) -> Tensor:
    """Return the fewest largest entries of `among` whose removal bounds the mean square."""
    squares = torch.where(among, x.square(), torch.inf)
    ordered = squares.flatten().sort().values
    ranks = torch.arange(1, ordered.shape[0] + 1, device=x.device)
    kept = (ordered.double().cumsum(0) / ranks <= bound).sum(0, keepdim=True)
    smallest_dropped = torch.cat([ordered, ordered.new_full((1,), torch.inf)])[kept]
    return among & (squares >= smallest_dropped)


def top_entropy(entropy: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """Return which tokens have an entropy at or above its (1 - fraction) quantile, or NaN.

    The quantile is taken over unmasked tokens and interpolates linearly, like `torch.quantile`, but
    works for any number of tokens and does not synchronize with the host.
    """
    if entropy.numel() == 0:
        return mask
    known = mask & ~entropy.isnan()
    ordered = torch.where(known, entropy, torch.inf).flatten().sort().values
    rank = (1 - fraction) * (known.sum() - 1).clamp(min=0).to(entropy.dtype)
    below, above = ordered[torch.stack([rank.floor(), rank.ceil()]).long()]
    threshold = torch.lerp(below, above, rank.frac())
    return mask & ~(entropy < threshold)
