"""Tokens that are dropped from the policy term: off-policy negatives, and low entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.reference.objectives import difference
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
    produce do not help. Differences that are NaN count as 0, as in TRL.
    """
    gap = difference(sampled_logprobs, logprobs.detach())
    drift = sequences.mean(torch.where(gap.isnan(), 0.0, gap), mask)
    return mask & (advantages < 0) & (drift > threshold)


def top_entropy(entropy: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """Return which tokens are at or above the (1 - fraction) quantile of entropy, or are NaN.

    The quantile is taken over unmasked tokens and interpolates linearly, as in `torch.quantile`,
    but works for any number of tokens and without synchronizing with the host.
    """
    if entropy.numel() == 0:
        return mask
    known = mask & ~entropy.isnan()
    ordered = torch.where(known, entropy, torch.inf).flatten().sort().values
    rank = (1 - fraction) * (known.sum() - 1).clamp(min=0).to(entropy.dtype)
    below, above = ordered[torch.stack([rank.floor(), rank.ceil()]).long()]
    threshold = torch.lerp(below, above, rank.frac())
    return mask & ~(entropy < threshold)
