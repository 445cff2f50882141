"""Log-ratios within the bounds of an objective, for the metrics of other trainers."""

from __future__ import annotations

from torch import Tensor

from fastrl import Objective


def within_bounds(log_ratio: Tensor, objective: Objective) -> Tensor:
    """Return the log-ratio clamped to the `log_ratio_clamp` of the objective, without gradient."""
    bounds = objective.arguments.coefficients
    return log_ratio.detach().clamp(-bounds.log_ratio_low, bounds.log_ratio_high)
