"""Importance weights between the trainer's policy and the engine that sampled the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args, get_type_hints

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
    level = correction.level
    bounded = token_estimate(logprobs.detach(), rollout_logprobs, correction)
    bounded = torch.where(mask, bounded, 0.0)
    if level == "sequence":
        bounded = sequences.spread(sequences.total(bounded), bounded)
    elif level == "geometric":
        bounded = sequences.mean(bounded, mask)
    elif level == "max":
        bounded = sequences.greatest(bounded, mask)
    outside, bounded = outside_bounds(bounded, correction)
    if correction.kind == "truncate":
        return bounded.clamp(correction.low, correction.high)
    kept = torch.where(bounded.isnan(), bounded, 1.0) if correction.kind == "filter" else bounded
    return torch.where(outside, 0.0, kept)


def token_estimate(
    logprobs: Tensor, rollout_logprobs: Tensor, correction: RolloutCorrection
) -> Tensor:
    """Return the log-ratio of each token, or its estimate of the KL."""
    estimator = correction.estimator
    if estimator == "ratio":
        return difference(logprobs, rollout_logprobs)
    if estimator == "reverse-k3":
        return kl_estimate(logprobs, rollout_logprobs, "k3")
    return kl_estimate(rollout_logprobs, logprobs, estimator)


def outside_bounds(estimate: Tensor, correction: RolloutCorrection) -> tuple[Tensor, Tensor]:
    """Return whether a `token_estimate` is outside the bounds, and what was compared with them."""
    bounded = saturate(estimate).exp() if correction.estimator == "ratio" else estimate
    # false for NaN, which is propagated
    return (bounded < correction.low) | (bounded > correction.high), bounded


_KINDS, _ESTIMATORS = (
    get_args(get_type_hints(RolloutCorrection)[name]) for name in ("kind", "estimator")
)


def numbers_of(corrections: Sequence[RolloutCorrection]) -> list[float]:
    """Return corrections of tokens in the form that operators take."""
    return [
        float(x)
        for c in corrections
        for x in (_KINDS.index(c.kind), _ESTIMATORS.index(c.estimator), c.low, c.high)
    ]


def corrections_of(numbers: Sequence[float]) -> list[RolloutCorrection]:
    """Return the corrections of `numbers_of`."""
    fields = zip(*(iter(numbers),) * 4, strict=True)
    return [
        RolloutCorrection(kind=_KINDS[int(k)], estimator=_ESTIMATORS[int(e)], low=low, high=high)
        for k, e, low, high in fields
    ]
