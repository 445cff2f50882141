"""The global denominator of a loss over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast, overload

import torch
from torch import Tensor

from fastrl import reference
from fastrl.checks import flag, one_of
from fastrl.contract import AGGREGATIONS, Aggregation
from fastrl.objective import Objective, TokenLoss, as_objective
from fastrl.objective.presets import Preset
from fastrl.ops._loss.term_weights import term_aggregations
from fastrl.ops._process_groups import checked_group, size_of, total
from fastrl.ops.token_weights import active_tokens, bounds_of

#: A tensor, or one for each micro-batch.
Parts = Tensor | Sequence[Tensor]


@overload
def global_normalizer(
    mask: Parts,
    *,
    aggregation: Aggregation,
    count_empty: bool = ...,
    group_size: int | None = ...,
    group_ids: Parts | None = ...,
    cu_seqlens: Parts | None = ...,
    process_group: torch.distributed.ProcessGroup | None = ...,
    gradients: Literal["mean", "sum"] = ...,
) -> Tensor: ...


@overload
def global_normalizer(
    mask: Parts,
    *,
    objective: Preset | Objective | TokenLoss,
    group_size: int | None = ...,
    group_ids: Parts | None = ...,
    cu_seqlens: Parts | None = ...,
    process_group: torch.distributed.ProcessGroup | None = ...,
    gradients: Literal["mean", "sum"] = ...,
) -> Tensor | dict[str, Tensor]: ...


def global_normalizer(
    mask: Parts,
    *,
    objective: Preset | Objective | TokenLoss | None = None,
    aggregation: Aggregation | None = None,
    count_empty: bool = False,
    group_size: int | None = None,
    group_ids: Parts | None = None,
    cu_seqlens: Parts | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    gradients: Literal["mean", "sum"] = "mean",
) -> Tensor | dict[str, Tensor]:
    """Return the `normalizer` that makes micro-batches and ranks add up to one whole batch.

        n = sum of the count over all micro-batches and ranks

    The aggregation determines what is counted (see `token_weights`): active tokens, or sequences or
    groups with an active token. With `gradients="mean"` the result is n / ranks, because DDP and
    FSDP divide the sum of the gradients by the number of ranks. Each call of the loss with this
    normalizer contributes its share, and the optimizer sees the gradients that a single process
    would compute from all sequences. TRL's `num_items_in_batch` and verl's `batch_num_tokens` are
    such counts.

    A sequence, and for `prompt-mean` a group, must lie in one micro-batch of one rank.
    `seq-mean-token-sum-norm` with `length_norm=None` divides by the width of the micro-batch: pad
    all micro-batches to one width, or pass `length_norm`.

    Args:
        mask: 0/1, `[B, T]` or packed `[N]`, as passed to the loss, and 0 at tokens with the id
            `ignore_index`; or a list with one mask for each micro-batch of the optimizer step.
            Micro-batches may have any number of rows, and ranks any number of micro-batches.
        objective: the objective that the loss gets: the name of a preset, an `Objective` or a
            function.
        aggregation: how tokens are weighted: a row of the table in `token_weights`. Pass it instead
            of `objective` for `token_weights` and `value_loss`.
        count_empty: count sequences without an active token in a mean over sequences, as TRL does.
            An `objective` has its own.
        group_size: for `prompt-mean`: the number of consecutive sequences for the same prompt.
        group_ids: for `prompt-mean`: integers `[B]` (packed `[S]`), the prompt of each sequence.
            For a list of masks a list.
        cu_seqlens: integers `[S + 1]`, the bounds of packed sequences, from 0 to N. For a list of
            masks a list.
        process_group: the data-parallel ranks, which hold different sequences. Tensor-parallel
            ranks hold the same tokens and must not be counted twice. None is this process alone.
            All ranks must make this call together, with the same options.
        gradients: whether the gradients of these ranks are averaged (`mean`) or summed (`sum`).

    Returns:
        A 0-d fp64 tensor, equal on all ranks to the last bit. If the objective has separate
        aggregations for KL or entropy, a dict of such tensors with the keys that the losses take.
        The call takes one all-gather of at most three numbers, and no host synchronization.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, is missing or has no effect; or
            nothing can be counted: `token-sum` has no denominator, and only the loss knows the
            tokens that `top_entropy_quantile` keeps, which a separate aggregation of the entropy
            counts.

    Examples:
        >>> import torch, fastrl
        >>> masks = [torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([[1, 1, 0], [0, 0, 0]])]
        >>> fastrl.global_normalizer(masks, objective="dapo").item()  # tokens
        6.0
        >>> fastrl.global_normalizer(masks, objective="grpo").item()  # sequences
        3.0
    """
    one_of("gradients", gradients, ("mean", "sum"))
    group = checked_group(process_group)
    how = _objective(objective, aggregation, count_empty)
    averaged = group is not None and gradients == "mean"
    names, separate = _counted_terms(how, averaged)
    masks = _parts("mask", mask)
    counts = [
        _counts(names, how, part, group_size, ids, bounds)
        for part, ids, bounds in zip(
            masks,
            _parts_like(mask, "group_ids", group_ids),
            _parts_like(mask, "cu_seqlens", cu_seqlens),
            strict=True,
        )
    ]
    count = total(torch.stack(counts).sum(0), group) / (size_of(group) if averaged else 1)
    return dict(zip(names, count.unbind(), strict=True)) if separate else count[0]


def _objective(objective: object, aggregation: str | None, count_empty: bool) -> Objective:
    if (objective is None) == (aggregation is None):
        given = "neither" if objective is None else "both"
        raise ValueError(f"objective or aggregation must be given, got {given}")
    flag("count_empty", count_empty)
    if objective is None:
        one_of("aggregation", aggregation, AGGREGATIONS)
        # not counted, and a packed batch needs one
        length_norm = 1.0 if aggregation == "seq-mean-token-sum-norm" else None
        return Objective(
            aggregation=cast("Aggregation", aggregation),
            count_empty=count_empty,
            length_norm=length_norm,
        )
    if count_empty:
        raise ValueError("count_empty has no effect with objective, which has its own")
    return as_objective(objective)


def _counted_terms(how: Objective, averaged: bool) -> tuple[list[str], bool]:
    """Return the terms that have a count, and whether they have separate aggregations."""
    terms = {"policy": how.aggregation}
    if how.kl_coef and how.kl_aggregation:
        terms["kl"] = how.kl_aggregation
    if how.entropy_coef and how.entropy_aggregation:
        terms["entropy"] = how.entropy_aggregation
    counted = [name for name, aggregation in terms.items() if aggregation != "token-sum"]
    if not counted or (averaged and len(counted) < len(terms)):
        raise ValueError(
            "aggregation token-sum has no normalizer: use gradients='sum' for the other terms, if "
            "any, and multiply the loss by the number of ranks that average their gradients"
        )
    if "entropy" in counted and how.top_entropy_quantile < 1:
        raise ValueError(
            "entropy_aggregation must be None or token-sum with top_entropy_quantile below 1: only "
            f"the loss knows the tokens to count; got {how.entropy_aggregation}"
        )
    return counted, len(terms) > 1


def _counts(
    names: list[str],
    how: Objective,
    mask: object,
    group_size: int | None,
    group_ids: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Return the counts of the named terms in one micro-batch."""
    active = active_tokens(mask)
    bounds = bounds_of(active, cu_seqlens)
    terms = term_aggregations(
        how, active, bounds, normalizer=None, group_size=group_size, group_ids=group_ids
    )._asdict()
    padded = active[None] if active.dim() == 1 else active
    sequences = reference.sequences_of(padded, bounds)
    return torch.stack([reference.local_count(padded, sequences, terms[name]) for name in names])


def _parts(name: str, value: object) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be a tensor or a list of them, got {type(value).__name__}")
    if not value:
        raise ValueError(
            f"{name} must contain at least one micro-batch, got none; a rank without tokens passes "
            "zeros"
        )
    return value


def _parts_like(mask: Parts, name: str, value: object) -> Sequence[Tensor | None]:
    """Return `value` for each micro-batch: a list if `mask` is a list."""
    if isinstance(mask, Tensor):
        return [cast("Tensor | None", value)]
    if value is None:
        return [None] * len(mask)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be a list like mask, got {type(value).__name__}")
    if len(value) != len(mask):
        raise ValueError(
            f"{name} must have {len(mask)} tensors, one for each mask, got {len(value)}"
        )
    return value
