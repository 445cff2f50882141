"""Tokens that leave the policy term: those of off-policy sequences, and those of low entropy."""

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
    """Say which tokens have A < 0 in a sequence whose mean of sampled - current is above.

    DeepSeek-V3.2 (arXiv 2512.02556): bad samples that the policy has left teach it nothing. A
    token whose difference is NaN is no evidence and counts as 0, as in TRL.
    """
    gap = difference(sampled_logprobs, logprobs.detach())
    drift = sequences.mean(torch.where(gap.isnan(), 0.0, gap), mask)
    return mask & (advantages < 0) & (drift > threshold)


def top_entropy(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Say which tokens are at or above the (1 - share) quantile of the valid tokens' entropy.

    The quantile is linear between order statistics, as in `torch.quantile`, for any number of
    tokens and without knowing it on the host. A token whose entropy is NaN stays.
    """
    if entropy.numel() == 0:
        return mask
    known = mask & ~entropy.isnan()
    ordered = torch.where(known, entropy, torch.inf).flatten().sort().values
    rank = (1 - share) * (known.sum() - 1).clamp(min=0).to(entropy.dtype)
    below, above = ordered[torch.stack([rank.floor(), rank.ceil()]).long()]
    threshold = torch.lerp(below, above, rank.frac())
    return mask & ~(entropy < threshold)
