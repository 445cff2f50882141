"""Per-token KL estimates of verl and OpenRLHF, which clamp only k3, to +-10."""

from __future__ import annotations

import torch
from torch import Tensor

import fastrl


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return k1, k2 or abs without bounds, or k3 clamped to +-10.

    `kl_divergence` saturates every estimator at a log-ratio of 80, though only k3 would overflow.
    """
    if estimator == "k3":
        return fastrl.kl_divergence(logprobs, ref_logprobs, estimator="k3", clamp=10.0)
    dtype = (
        torch.float64 if torch.float64 in (logprobs.dtype, ref_logprobs.dtype) else torch.float32
    )
    difference = logprobs.to(dtype) - ref_logprobs.to(dtype)
    if estimator == "k2":
        return 0.5 * difference.square()
    return difference.abs() if estimator == "abs" else difference


def straight_through(value: Tensor, slope: Tensor) -> Tensor:
    """Return a tensor with the value of one estimate and the gradient of another."""
    return value.detach() + slope - slope.detach()
