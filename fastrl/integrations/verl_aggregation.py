"""verl's ways to add up a loss, as token weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastrl

_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


def aggregation(
    mode: str,
    mask: Tensor,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[dict[str, Any], float]:
    """Return the options of `token_weights` for a mode of verl's, and a factor on the loss.

    verl divides by the count of the whole batch and multiplies by `dp_size`, against the mean
    over ranks that data parallelism takes of gradients: a `normalizer` of count / dp_size.
    """
    if mode not in _MODES:
        raise ValueError(f"loss_agg_mode must be one of {', '.join(_MODES)}; got {mode!r}")
    how: dict[str, Any] = {"aggregation": mode}
    if mode == "token-sum":
        return how, dp_size
    name, count = "global_batch_size", global_batch_size
    if mode == "token-mean":
        name, count = "batch_num_tokens", batch_num_tokens
    if mode == "seq-mean-token-sum-norm" and loss_scale_factor is not None:
        how["length_norm"] = float(loss_scale_factor)
    if count is not None:
        count = count.to(mask.device) if isinstance(count, Tensor) else count
        how["normalizer"] = count / dp_size
    elif dp_size > 1:
        raise ValueError(f"{name} is needed for loss_agg_mode {mode} where dp_size > 1")
    return how, 1.0


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    """Return sum_t w_t loss_t with the weights of `token_weights`; the modes have the same names.

    Example:
        >>> import torch
        >>> from fastrl.integrations.verl import agg_loss
        >>> loss, mask = torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1, 1], [1, 0]])
        >>> agg_loss(loss, mask, "token-mean"), agg_loss(loss, mask, "seq-mean-token-mean")
        (tensor(3.), tensor(3.5000))
    """
    how, factor = aggregation(
        loss_agg_mode, loss_mask, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor
    )
    weights = fastrl.token_weights(loss_mask, **how)
    return (weights * torch.where(loss_mask.bool(), loss_mat, 0.0)).sum() * factor
