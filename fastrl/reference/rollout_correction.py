"""Importance weights between the trainer's policy and the engine that sampled the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.objective.rollout_correction import RolloutCorrection
from fastrl.reference.objectives import difference, saturate
from fastrl.reference.sequences import Sequences


def rollout_correction(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequences: Sequences,
    correction: RolloutCorrection,
) -> Tensor:
    """Return the detached importance weight of every token, `[B, T]`."""
    log_ratio = torch.where(mask, difference(logprobs.detach(), rollout_logprobs), 0.0)
    if correction.level == "sequence":
        log_ratio = sequences.spread(sequences.total(log_ratio), log_ratio)
    elif correction.level == "geometric":
        log_ratio = sequences.mean(log_ratio, mask)
    ratio = saturate(log_ratio).exp()
    if correction.kind == "truncate":
        return ratio.clamp(correction.low, correction.high)
    # false for NaN, which is propagated
    outside = (ratio < correction.low) | (ratio > correction.high)
    kept = torch.where(ratio.isnan(), ratio, 1.0) if correction.kind == "filter" else ratio
    return torch.where(outside, 0.0, kept)
