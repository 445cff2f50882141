"""verl's aggregation modes as token weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl.integrations.verl.masks import factors

_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


class Aggregation(NamedTuple):
    """How a loss is aggregated: scale * sum_t w_t factor_t loss_t.

    Attributes:
        mask: 0/1, `[B, T]`.
        options: the options of `token_weights` that give the weights w for the mask.
        factors: `[B, T]`, from mask values other than 0 and 1, or None.
        scale: the factor of the sum.
    """

    mask: Tensor
    options: dict[str, Any]
    factors: Tensor | None = None
    scale: float = 1.0


def aggregation(
    mode: str,
    mask: Tensor,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Aggregation:
    """Return one of verl's modes as options of `token_weights`.

    verl divides by the count of the whole batch and multiplies by `dp_size`, because data
    parallelism averages gradients over ranks. The `normalizer` is therefore count / dp_size.
    """
    if mode not in _MODES:
        raise ValueError(f"loss_agg_mode must be one of {', '.join(_MODES)}; got {mode!r}")
    options: dict[str, Any] = {"aggregation": mode}
    name, count = "global_batch_size", global_batch_size
    if mode == "token-mean":
        name, count = "batch_num_tokens", batch_num_tokens
    weights = factors(mask)
    if weights is not None:
        lengths = weights.sum(-1, keepdim=True)
        mask = mask.bool() if mode.startswith("token") else mask.bool() & (lengths > 0)
        if mode == "seq-mean-token-mean":
            weights = weights * mask.sum(-1, keepdim=True) / (lengths + 1e-8)
        elif mode == "token-mean" and dp_size == 1 and count is None:
            count = lengths.sum()
    if mode == "token-sum":
        return Aggregation(mask, options, weights, dp_size)
    if mode == "seq-mean-token-sum-norm" and loss_scale_factor is not None:
        options["length_norm"] = float(loss_scale_factor)
    if count is not None:
        if isinstance(count, Tensor):  # a quotient of integers has the default dtype
            count = count.to(mask.device, None if count.is_floating_point() else torch.float32)
        options["normalizer"] = count / dp_size
    elif dp_size > 1:
        raise ValueError(f"{name} is needed for loss_agg_mode {mode} if dp_size > 1")
    return Aggregation(mask, options, weights)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    """Return sum_t w_t loss_t with the weights of `token_weights`.

    Args:
        loss_mat: the loss of each token, `[B, T]`.
        loss_mask: 0/1, `[B, T]`; other values weight the tokens, and their sum is the count.
        loss_agg_mode: how tokens are weighted: a row of the table in `token_weights`.
        dp_size: the number of ranks over which data parallelism averages the gradients.
        batch_num_tokens: the number of tokens in the global batch; None counts this batch.
        global_batch_size: the number of sequences in the global batch; None counts this batch.
        loss_scale_factor: the length in `seq-mean-token-sum-norm`, in tokens; None is T.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: the mode is unknown, or `dp_size` is above 1 without a global count.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl import agg_loss
        >>> loss, mask = torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1, 1], [1, 0]])
        >>> agg_loss(loss, mask, "token-mean"), agg_loss(loss, mask, "seq-mean-token-mean")
        (tensor(3.), tensor(3.5000))
    """
    how = aggregation(
        loss_agg_mode, loss_mask, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor
    )
    weights = fastrl.token_weights(how.mask, **how.options)
    if how.factors is not None:
        weights = weights * how.factors
    return (weights * torch.where(how.mask.bool(), loss_mat, 0.0)).sum() * how.scale
