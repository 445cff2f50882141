"""The value-function loss of PPO, with clipping."""

from __future__ import annotations

from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.backend import Backend, torch_only
from fastrl.checks import as_mask, one_of, per_token, positive, same_shape
from fastrl.contract import Aggregation
from fastrl.ops.masked import masked_mean
from fastrl.ops.token_weights import bounds_of, weights_of


class ValueLoss(NamedTuple):
    """A value loss and its metrics.

    Attributes:
        loss: scalar, differentiable.
        metrics: 0-d tensors without gradient: `value_mean`, `return_mean`, `clip_fraction` (of the
            active tokens), `explained_variance` (1 - var(R - V) / var(R), or 0 if all returns are
            equal).

    Examples:
        >>> import torch, fastrl
        >>> one = torch.ones(1, 2)
        >>> fastrl.value_loss(one, one, one).metrics["value_mean"]
        tensor(1.)
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    loss: Literal["mse", "huber"] = "mse",
    aggregation: Aggregation = "token-mean",
    normalizer: float | Tensor | None = None,
    length_norm: float | None = None,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> ValueLoss:
    """Return the loss of a value function, optionally clipped around its old values.

        L = sum_t w_t e(V_t, R_t)
        e(V, R) = (V - R)^2 / 2, or the Huber loss with delta 1

    `token_weights` defines w_t. With `clip`, the loss of a token is, as in PPO (Schulman et al.
    2017, arXiv 1707.06347; OpenAI baselines), TRL and verl:

        max(e(V, R), e(V_old + clip(V - V_old, -clip, clip), R))

    Args:
        values: `[B, T]` or packed `[N]`; the only differentiable argument.
        returns: the shape of `values`.
        mask: 0/1, the shape of `values`; masked tokens have no effect.
        old_values: the shape of `values`; needed with `clip`.
        clip: bound on `|V - V_old|`, or None.
        loss: `mse` or `huber`.
        aggregation: how tokens are weighted: a row of the table in `token_weights`.
        normalizer: the global denominator from `global_normalizer`, a number or a tensor of one
            element; None counts this call alone.
        length_norm: the constant of `seq-mean-token-sum-norm`, in tokens; None is the padded width
            T.
        group_size: for `prompt-mean`: the number of consecutive sequences for the same prompt.
        group_ids: for `prompt-mean`: integers `[B]` (packed `[S]`), the prompt of each sequence.
        cu_seqlens: integers `[S + 1]`, the bounds of packed sequences, from 0 to N.
        backend: `auto` or `reference`; the function is plain torch on every device.

    Returns:
        The loss, a scalar, with its metrics, as a `ValueLoss`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, is missing, or has no effect.

    Examples:
        >>> import torch, fastrl
        >>> values, returns = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0]])
        >>> fastrl.value_loss(values, returns, torch.tensor([[1, 1]])).loss
        tensor(2.5000)
    """
    torch_only(backend)
    current = per_token("values", values)
    active = as_mask("mask", mask, current, "values")
    target = same_shape("returns", per_token("returns", returns), current, "values").detach()
    one_of("loss", loss, ("mse", "huber"))
    if (clip is None) != (old_values is None):
        given, missing = ("clip", "old_values") if old_values is None else ("old_values", "clip")
        raise ValueError(f"{missing} is needed when {given} is given")
    dtype = torch.float64 if current.dtype == torch.float64 else torch.float32
    old = None
    if old_values is not None:
        old = same_shape("old_values", per_token("old_values", old_values), current, "values")
        old = torch.where(active, old.detach().to(dtype), 0.0)
    bounds = bounds_of(current, cu_seqlens)
    weights = weights_of(
        active,
        bounds,
        aggregation=aggregation,
        normalizer=normalizer,
        length_norm=length_norm,
        group_size=group_size,
        group_ids=group_ids,
        dtype=dtype,
    ).reshape(current.shape)
    v = torch.where(active, current.to(dtype), 0.0)
    r = torch.where(active, target.to(dtype), 0.0)
    per_token_loss, clipped = reference.value_loss(
        v, r, old, None if clip is None else positive("clip", clip), loss
    )
    with torch.no_grad():
        mean_return = masked_mean(r, active)
        # relative to one of them, since the rounded mean of equal returns may differ from them
        largest = torch.cat([r.new_full((1,), -inf), torch.where(active, r, -inf).reshape(-1)])
        apart = torch.where(active, r - largest.amax(), 0.0)
        spread = masked_mean((apart - masked_mean(apart, active)).square(), active)
        error = r - v
        unexplained = masked_mean((error - masked_mean(error, active)).square(), active)
        explained = 1 - unexplained / torch.where(spread > 0, spread, 1.0)
        metrics = {
            "value_mean": masked_mean(v, active),
            "return_mean": mean_return,
            "clip_fraction": masked_mean(clipped.to(dtype), active),
            "explained_variance": torch.where(spread == 0, 0.0, explained),
        }
    return ValueLoss((weights * per_token_loss).sum(), metrics)
