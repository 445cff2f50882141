"""Importance weights between the trainer's policy and the engine that sampled the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.objective.rollout_correction import RolloutCorrection
from fastrl.reference.objectives import difference, kl_estimate, saturate
from fastrl.reference.sequences import Sequences


def rollout_correction(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequences: Sequences,
    correction: RolloutCorrection,
) -> Tensor:
    """Return the detached importance weight of every token, `[B, T]`."""
    estimator, level = correction.estimator, correction.level
    if estimator == "ratio":
        bounded = difference(logprobs.detach(), rollout_logprobs)
    elif estimator == "reverse-k3":
        bounded = kl_estimate(logprobs.detach(), rollout_logprobs, "k3")
    else:
        bounded = kl_estimate(rollout_logprobs, logprobs.detach(), estimator)
    bounded = torch.where(mask, bounded, 0.0)
    if level == "sequence":
        bounded = sequences.spread(sequences.total(bounded), bounded)
    elif level == "geometric":
        bounded = sequences.mean(bounded, mask)
    elif level == "max":
        bounded = sequences.greatest(bounded, mask)
    if estimator == "ratio":
        bounded = saturate(bounded).exp()
    if correction.kind == "truncate":
        return bounded.clamp(correction.low, correction.high)
    # false for NaN, which is propagated
    outside = (bounded < correction.low) | (bounded > correction.high)
    kept = torch.where(bounded.isnan(), bounded, 1.0) if correction.kind == "filter" else bounded
    return torch.where(outside, 0.0, kept)
