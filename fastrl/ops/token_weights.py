"""Weights of tokens in a loss, and checks of sequences, groups and normalizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import reference
from fastrl.backend import Backend, torch_only
from fastrl.checks import (
    FLOATS,
    INTEGERS,
    as_mask,
    can_read,
    flag,
    integer,
    number,
    on_device,
    one_of,
    positive,
    sequence_bounds,
    tensor,
    whole,
)
from fastrl.contract import AGGREGATIONS, Aggregation, AggregationArguments
from fastrl.library import called, operators
from fastrl.reference import sequences_of


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
    """Return the weight w_t of every token in the loss sum_t w_t loss_t.

    | aggregation | w_t of an active token | `normalizer` replaces |
    | --- | --- | --- |
    | `token-mean` | 1 / tokens | tokens |
    | `seq-mean-token-mean` | 1 / (sequences * tokens of the sequence) | sequences |
    | `seq-mean-token-sum` | 1 / sequences | sequences |
    | `seq-mean-token-sum-norm` | 1 / (sequences * length_norm) | sequences |
    | `prompt-mean` | 1 / (groups * tokens of the group) | groups |
    | `token-sum` | 1 | - |

    GRPO (arXiv 2402.03300) uses `seq-mean-token-mean`, DAPO (arXiv 2503.14476) `token-mean`, and
    Dr. GRPO (arXiv 2503.20783) `seq-mean-token-sum-norm`. verl's `loss_agg_mode` has the same
    names.

    Sequences and groups without an active token are not counted, unless `count_empty` includes them
    in means over sequences. If no token is active, all weights are 0. With a `normalizer` from
    `global_normalizer`, which counts all micro-batches and ranks, the gradient does not depend on
    how the batch is split.

    Args:
        mask: 0/1, `[B, T]` or packed `[N]`.
        aggregation: how tokens are weighted: a row of the table in `token_weights`.
        normalizer: the global denominator from `global_normalizer`, a number or a tensor of one
            element; None counts this call alone. It may be 0 if no token is active. With active
            tokens, 0 raises on a CPU; on a GPU, where a tensor's value is not read, the weights are
            infinite.
        length_norm: the constant of `seq-mean-token-sum-norm`, in tokens; None is the padded width
            T.
        group_size: for `prompt-mean`: the number of consecutive sequences for the same prompt.
        group_ids: for `prompt-mean`: integers `[B]` (packed `[S]`), the prompt of each sequence.
        count_empty: count sequences without an active token in a mean over sequences, as TRL does.
        cu_seqlens: integers `[S + 1]`, the bounds of packed sequences, from 0 to N.
        backend: `auto` or `reference`; the function is plain torch on every device.

    Returns:
        fp32 weights, the shape of `mask`, 0 at masked tokens.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, is missing, or has no effect.

    Examples:
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
    active = active_tokens(mask)
    weights = weights_of(
        active,
        bounds_of(active, cu_seqlens),
        aggregation=aggregation,
        normalizer=normalizer,
        length_norm=length_norm,
        group_size=group_size,
        group_ids=group_ids,
        count_empty=flag("count_empty", count_empty),
    )
    return weights.reshape(active.shape)


def active_tokens(mask: object) -> Tensor:
    """Return a mask `[B, T]` or packed `[N]` as bool."""
    active = tensor("mask", mask)
    if active.dim() not in (1, 2):
        raise ValueError(f"mask must have shape [B, T] or [N], got {tuple(active.shape)}")
    return as_mask("mask", active, active, "mask")


def weights_of(
    active: Tensor,
    cu_seqlens: Tensor | None,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Tensor:
    """Return w_t `[B, T]` (packed `[1, N]`); see `aggregation_arguments` for the options."""
    how = aggregation_arguments(active, cu_seqlens, **options)
    padded = active[None] if active.dim() == 1 else active
    check_normalizer(how, padded)
    return reference.token_weights(padded, sequences_of(padded, cu_seqlens), how, dtype)


def sequence_weights(
    mask: Tensor,
    cu_seqlens: Tensor | None,
    how: AggregationArguments,
    backend: str,
    token_ids: Tensor | None = None,
    ignore_index: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return the weight of an active token in each sequence, `[S]`, and which tokens are active.

    The mask is `[B, T]` or `[1, N]`, 0/1 of any dtype; tokens with the id `ignore_index` are
    masked, too.
    """
    # groups in any order need a sort, which the GPU kernels do not do
    use_torch = backend == "reference" or (backend != "cpu" and how.group_ids is not None)
    if use_torch:
        active = as_mask("mask", mask, mask, "mask")
        active = active if token_ids is None else active & (token_ids != ignore_index)
        check_normalizer(how, active)
        sequences = sequences_of(active, cu_seqlens)
        return reference.sequence_weights(active, sequences, how, dtype), active
    weights, active = called(
        operators(backend).sequence_weights, mask, token_ids, ignore_index, cu_seqlens, *how
    )
    differs = token_ids is not None or mask.dtype != torch.bool
    return weights, active if differs else mask


def bounds_of(tokens: Tensor, cu_seqlens: object) -> Tensor | None:
    """Return checked `cu_seqlens`, which only packed tokens `[N]` may have."""
    if cu_seqlens is None:
        return None
    if tokens.dim() != 1:
        raise ValueError(
            f"cu_seqlens is for packed tokens [N], got tokens of shape {tuple(tokens.shape)}"
        )
    return sequence_bounds(cu_seqlens, tokens.shape[0], tokens)


def aggregation_arguments(
    tokens: Tensor,
    cu_seqlens: Tensor | None,
    *,
    aggregation: str,
    normalizer: object,
    length_norm: float | None = None,
    group_size: object = None,
    group_ids: object = None,
    count_empty: bool = False,
) -> AggregationArguments:
    """Check the aggregation of tokens `[B, T]` or packed `[N]`."""
    one_of("aggregation", aggregation, AGGREGATIONS)
    packed = tokens.dim() == 1
    if packed and cu_seqlens is None and aggregation not in ("token-mean", "token-sum"):
        raise ValueError(f"cu_seqlens is needed for aggregation {aggregation} of packed tokens")
    if aggregation == "seq-mean-token-sum-norm":
        if length_norm is None and packed:
            raise ValueError(
                f"length_norm is needed for aggregation {aggregation} of packed tokens"
            )
        length_norm = 0.0 if length_norm is None else positive("length_norm", length_norm)
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
    count = tokens.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return AggregationArguments(
        AGGREGATIONS.index(aggregation),
        *_normalizer(normalizer, aggregation, tokens),
        length_norm or 0.0,
        count_empty,
        *_groups(group_size, group_ids, aggregation, count, tokens),
    )


def _normalizer(normalizer: object, aggregation: str, like: Tensor) -> tuple[float, Tensor | None]:
    if normalizer is None:
        return 0.0, None
    if aggregation == "token-sum":
        raise ValueError("normalizer has no effect with aggregation token-sum")
    if not isinstance(normalizer, Tensor):
        count = number("normalizer", normalizer)
        count = count if count == 0 else positive("normalizer", normalizer)
        # a symbol would be specialized to its value as an argument of the operator, and 0 would
        # mean the local count
        if isinstance(count, torch.SymFloat | torch.SymInt) or count == 0:
            return 0.0, torch.full((1,), count, device=like.device, dtype=torch.float32)
        return count, None
    tensor("normalizer", normalizer)
    if not (normalizer.is_floating_point() or normalizer.dtype in INTEGERS):
        raise TypeError(f"normalizer must be a number or a real tensor, got {normalizer.dtype}")
    if normalizer.numel() != 1:
        raise ValueError(
            f"normalizer must be a number or have one element, got shape {tuple(normalizer.shape)}"
        )
    on_device("normalizer", normalizer, like, "mask")
    element = normalizer.detach()
    unusual = element.is_floating_point() and element.dtype not in FLOATS
    return 0.0, element.float() if unusual else element


def check_normalizer(how: AggregationArguments, active: Tensor) -> None:
    """Raise unless the normalizer is above 0, for the reference backend."""
    given = how.normalizer_tensor
    # a normalizer of 0 is correct if no token is active
    if given is not None and can_read(given) and not (float(given) == 0 and not active.any()):
        positive("normalizer", float(given))


def _groups(
    group_size: Any, group_ids: object, aggregation: str, count: int, like: Tensor
) -> tuple[int, Tensor | None]:
    if aggregation != "prompt-mean":
        for name, value in (("group_size", group_size), ("group_ids", group_ids)):
            if value is not None:
                raise ValueError(
                    f"{name} has no effect with aggregation {aggregation}; it is for prompt-mean"
                )
        return 0, None
    if group_ids is not None:
        if group_size is not None:
            raise ValueError("group_size and group_ids cannot both be given")
        ids = integer("group_ids", group_ids)
        on_device("group_ids", ids, like, "mask")
        if ids.shape != (count,):
            raise ValueError(
                f"group_ids must have shape ({count},), one for each sequence, "
                f"got {tuple(ids.shape)}"
            )
        return 0, ids.to(torch.int64).contiguous()
    if group_size is None:
        raise ValueError("group_size or group_ids is needed for aggregation prompt-mean")
    size = check_group_size(group_size, count, "sequences")
    if isinstance(size, torch.SymInt):
        return 0, torch.arange(count, device=like.device) // size
    return size, None


def check_group_size(group_size: object, count: int, of: str) -> int:
    """Return `group_size` if it divides `count`."""
    size = whole("group_size", group_size, low=1)
    if count % size:
        raise ValueError(f"group_size must divide the number of {of} {count}, got {size}")
    return size
