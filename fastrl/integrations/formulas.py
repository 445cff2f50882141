"""Formulas that the drop-ins of several trainers share.

They are TRL's options of a loss, most of which Liger has, too, as presets of the convention `trl`;
KL estimates of verl and OpenRLHF, which clamp only k3, to +-10; and log-ratios for metrics.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

import fastrl
from fastrl import GammaWeights, Objective
from fastrl.objective.presets import Preset

#: The values of `loss_type` that are presets.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")


def trl_objective(
    loss_type: str,
    *,
    level: str,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
    sapo_temperature_pos: float,
    sapo_temperature_neg: float,
    beta: float,
    bias_correction: bool,
    max_completion_length: int | None,
    entropy_coef: float = 0.0,
    off_policy_threshold: float | None = None,
    top_entropy_quantile: float = 1.0,
    gamma_weights: GammaWeights | None = None,
) -> Objective:
    """Return the objective of a `loss_type`; options that it does not use are ignored.

    Raises:
        ValueError: an option has a value that no `Objective` has.
    """
    fields: dict[str, Any] = {"level": level, "kl_coef": beta, "entropy_coef": entropy_coef}
    fields |= {
        "off_policy_threshold": off_policy_threshold,
        "top_entropy_quantile": top_entropy_quantile,
    }
    if not bias_correction:
        fields["kl_gradient"] = "exact"
    if loss_type == "cispo":
        # epsilon_high is the upper bound of the ratio itself; there is no lower one
        fields["clip_high"] = epsilon_high - 1.0
    elif loss_type == "sapo":
        fields |= {
            "sapo_temperature_pos": sapo_temperature_pos,
            "sapo_temperature_neg": sapo_temperature_neg,
        }
    elif loss_type == "vespo":
        fields["gamma_weights"] = gamma_weights or GammaWeights()
    else:
        fields |= {"clip_low": epsilon_low, "clip_high": epsilon_high, "delta": delta}
    if loss_type == "dr_grpo":
        fields["length_norm"] = max_completion_length
    return Objective.preset(cast("Preset", loss_type), convention="trl", **fields)


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


def within_bounds(log_ratio: Tensor, objective: Objective) -> Tensor:
    """Return the log-ratio clamped to the `log_ratio_clamp` of the objective, without gradient."""
    bounds = objective.arguments.coefficients
    return log_ratio.detach().clamp(-bounds.log_ratio_low, bounds.log_ratio_high)
