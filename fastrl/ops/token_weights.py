"""Weights of tokens in a loss, and the checks on masks, sequences and groups that they need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import reference
from fastrl.backend import Backend, torch_only
from fastrl.checks import (
    as_mask,
    can_read,
    flag,
    integer,
    on_device,
    one_of,
    positive,
    sequence_bounds,
    tensor,
    whole,
)
from fastrl.objective import AGGREGATIONS, Aggregation
from fastrl.reference import Sequences


def token_weights(
    mask: Tensor,
    *,
    aggregation: Aggregation,
    normalizer: float | Tensor | None = None,
    length_norm: float | None = None,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    count_empty: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the weight w_t of every token, so that a loss is sum_t w_t * loss_t.

    | aggregation | w_t of a valid token | `normalizer` takes the place of |
    | --- | --- | --- |
    | `token-mean` | 1 / tokens | tokens |
    | `seq-mean-token-mean` | 1 / (sequences * tokens of the sequence) | sequences |
    | `seq-mean-token-sum` | 1 / sequences | sequences |
    | `seq-mean-token-sum-norm` | 1 / (sequences * length_norm) | sequences |
    | `prompt-mean` | 1 / (groups * tokens of the group) | groups |
    | `token-sum` | 1 | - |

    A sequence or group without a valid token counts for nothing, unless `count_empty` has means
    over sequences count them all; an empty mask gives all zeros.
    With the normalizer of the whole batch (all micro-batches and ranks) the gradient does not
    depend on how the batch is split.

    Args:
        mask: 0/1, `[B, T]` or packed `[N]`.
        aggregation: a row of the table.
        normalizer: the global denominator, a float or a tensor of one element.
        length_norm: the constant of `seq-mean-token-sum-norm`; None is the padded width T.
        group_size: for `prompt-mean`: so many consecutive sequences answer one prompt.
        group_ids: for `prompt-mean`: integers `[B]` (packed `[S]`), the prompt of each sequence.
        count_empty: whether a mean over sequences counts those without a valid token (TRL).
        cu_seqlens: int `[S + 1]`, where packed sequences begin and end.
        backend: `auto` or `reference`; this function is plain torch on every device.

    Returns:
        fp32 weights, the shape of `mask`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, is missing, or has no effect.

    Example:
        >>> import torch, fastrl
        >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
        >>> fastrl.token_weights(mask, aggregation="token-mean")
        tensor([[0.2500, 0.2500, 0.2500],
                [0.2500, 0.0000, 0.0000]])
        >>> fastrl.token_weights(mask, aggregation="seq-mean-token-sum", normalizer=4)
        tensor([[0.2500, 0.2500, 0.2500],
                [0.2500, 0.0000, 0.0000]])
    """
    torch_only(backend)
    valid = tensor("mask", mask)
    if valid.dim() not in (1, 2):
        raise ValueError(f"mask must have shape [B, T] or [N], got {tuple(valid.shape)}")
    valid = as_mask("mask", valid, valid, "mask")
    bounds = bounds_of(valid, cu_seqlens)
    padded = valid[None] if valid.dim() == 1 else valid
    weights = weights_of(
        padded,
        reference.sequences_of(padded, bounds),
        packed=valid.dim() == 1,
        cut=bounds is not None,
        aggregation=aggregation,
        normalizer=normalizer,
        length_norm=length_norm,
        group_size=group_size,
        group_ids=group_ids,
        count_empty=flag("count_empty", count_empty),
    )
    return weights.reshape(valid.shape)


def bounds_of(tokens: Tensor, cu_seqlens: object) -> Tensor | None:
    """Return checked `cu_seqlens` for packed tokens `[N]`; a padded `[B, T]` takes none."""
    if cu_seqlens is None:
        return None
    if tokens.dim() != 1:
        raise ValueError(
            f"cu_seqlens is for packed tokens [N], got tokens of shape {tuple(tokens.shape)}"
        )
    return sequence_bounds(cu_seqlens, tokens.shape[0], tokens)


def weights_of(
    mask: Tensor,
    sequences: Sequences,
    *,
    packed: bool,
    cut: bool,
    aggregation: str,
    normalizer: object,
    length_norm: float | None,
    group_size: object,
    group_ids: object,
    count_empty: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return w_t `[B, T]`; `packed` says that the mask is one row of packed tokens, `cut` whether
    their sequences are known.
    """  # noqa: D205
    one_of("aggregation", aggregation, AGGREGATIONS)
    if packed and not cut and aggregation not in ("token-mean", "token-sum"):
        raise ValueError(f"cu_seqlens is needed for aggregation {aggregation} of packed tokens")
    if aggregation == "seq-mean-token-sum-norm":
        if length_norm is None and packed:
            raise ValueError(
                f"length_norm is needed for aggregation {aggregation} of packed tokens"
            )
        width = float(max(mask.shape[1], 1))
        length_norm = width if length_norm is None else positive("length_norm", length_norm)
    elif length_norm is not None:
        raise ValueError(
            f"length_norm has no effect with aggregation {aggregation}; "
            "it is used by seq-mean-token-sum-norm"
        )
    if count_empty and not aggregation.startswith("seq-mean"):
        raise ValueError(
            f"count_empty has no effect with aggregation {aggregation}; "
            "it is used by the means over sequences"
        )
    return reference.token_weights(
        mask,
        sequences,
        aggregation=aggregation,
        normalizer=_normalizer(normalizer, aggregation, mask, dtype),
        length_norm=length_norm,
        groups=_groups(group_size, group_ids, aggregation, sequences, mask),
        count_empty=count_empty,
        dtype=dtype,
    )


def _normalizer(
    normalizer: object, aggregation: str, like: Tensor, dtype: torch.dtype
) -> float | Tensor | None:
    if normalizer is None:
        return None
    if aggregation == "token-sum":
        raise ValueError("normalizer has no effect with aggregation token-sum")
    if not isinstance(normalizer, Tensor):
        return positive("normalizer", normalizer)
    tensor("normalizer", normalizer)
    if normalizer.is_complex() or normalizer.dtype == torch.bool:
        raise TypeError(f"normalizer must be a float or a tensor of one, got {normalizer.dtype}")
    if normalizer.numel() != 1:
        raise ValueError(
            f"normalizer must be a float or have one element, got shape {tuple(normalizer.shape)}"
        )
    on_device("normalizer", normalizer, like, "mask")
    # with nothing to weigh, a count of 0 is as it should be
    if can_read(normalizer) and not (float(normalizer) == 0 and not bool(like.any())):
        positive("normalizer", float(normalizer))
    return normalizer.detach().reshape(()).to(dtype)


def _groups(
    group_size: Any, group_ids: object, aggregation: str, sequences: Sequences, like: Tensor
) -> Tensor | None:
    if aggregation != "prompt-mean":
        for name, value in (("group_size", group_size), ("group_ids", group_ids)):
            if value is not None:
                raise ValueError(
                    f"{name} has no effect with aggregation {aggregation}; it is for prompt-mean"
                )
        return None
    if group_ids is not None:
        if group_size is not None:
            raise ValueError("group_size and group_ids cannot both be given")
        ids = integer("group_ids", group_ids)
        on_device("group_ids", ids, like, "mask")
        if ids.shape != (sequences.count,):
            raise ValueError(
                f"group_ids must have shape ({sequences.count},), one for each sequence, "
                f"got {tuple(ids.shape)}"
            )
        return ids.to(torch.int64)
    if group_size is None:
        raise ValueError("group_size or group_ids is needed for aggregation prompt-mean")
    size = check_group_size(group_size, sequences.count, "sequences")
    return torch.arange(sequences.count, device=like.device) // size


def check_group_size(group_size: object, count: int, of: str) -> int:
    """Return `group_size` if it divides `count`."""
    size = whole("group_size", group_size, low=1)
    if count % size:
        raise ValueError(f"group_size must divide the number of {of} {count}, got {size}")
    return size
