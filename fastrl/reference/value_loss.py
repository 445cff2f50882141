"""Value-function losses per token."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.reference.objectives import clamp


def value_error(values: Tensor, returns: Tensor, loss: str) -> Tensor:
    """Return `(V - R)^2 / 2`, or for huber `|V - R| - 1/2` where `|V - R| > 1`."""
    difference = values - returns
    if loss == "mse":
        return 0.5 * difference.square()
    size = difference.abs()
    linear = size > 1  # false for NaN, where the derivative of abs would be 0
    # the inner `where` keeps 0 * inf out of the gradient of the branch that is not taken
    return torch.where(linear, size - 0.5, 0.5 * torch.where(linear, 0.0, difference).square())


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None, clip: float | None, loss: str
) -> tuple[Tensor, Tensor]:
    """Return the loss of every token, and where the clipped loss is larger."""
    if clip is None or old_values is None:
        return value_error(values, returns, loss), torch.zeros_like(values, dtype=torch.bool)
    bounded = clamp(values, old_values - clip, old_values + clip)
    broken = old_values.isnan()
    bounded = torch.where(broken, values + old_values, bounded)  # NaN, with gradient NaN
    with torch.no_grad():
        free_loss, bounded_loss = (value_error(x, returns, loss) for x in (values, bounded))
        clipped = bounded_loss > free_loss
    # in a tie the unclipped loss determines the gradient; `torch.maximum` would average the two
    chosen = torch.where(clipped | broken, bounded, values)
    return value_error(chosen, returns, loss), clipped
