"""TRL's options of a loss, most of which Liger shares, as presets of the convention `trl`."""

from __future__ import annotations

from typing import Any, cast

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
