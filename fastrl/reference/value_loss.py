"""Value-function losses per token."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.reference.objectives import hold


def value_error(values: Tensor, returns: Tensor, loss: str) -> Tensor:
    """`(V - R)^2 / 2`, or Huber with its corner at 1: `|V - R| - 1/2` beyond it."""
    difference = values - returns
    if loss == "mse":
        return 0.5 * difference.square()
    size = difference.abs()
    far = size > 1  # not where it is NaN: the slope of abs is 0 there
    # the branch that is not taken has the slope 0, not 0 times an infinite difference
    return torch.where(far, size - 0.5, 0.5 * torch.where(far, 0.0, difference).square())


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None, clip: float | None, loss: str
) -> tuple[Tensor, Tensor]:
    """Return the loss of every token, and where the clipped branch is the larger one."""
    if clip is None or old_values is None:
        return value_error(values, returns, loss), torch.zeros_like(values, dtype=torch.bool)
    held = hold(values, old_values - clip, old_values + clip)
    lost = old_values.isnan()
    held = torch.where(lost, values + old_values, held)  # NaN, and so is the slope
    with torch.no_grad():
        free, bounded = (value_error(x, returns, loss) for x in (values, held))
        clipped = bounded > free
    # where both are equal the free one, whole: `torch.maximum` would take half of each slope
    taken = torch.where(clipped | lost, held, values)
    return value_error(taken, returns, loss), clipped
