"""Differentiable statistics of logits whose vocabulary is split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fastrl import reference
from fastrl.checks import is_sharded
from fastrl.contract import RowArguments, RowStats
from fastrl.library import operators
from fastrl.ops._autograd.first_derivative import first_derivative_only
from fastrl.ops._process_groups import gathered
from fastrl.ops._row_stats import public_stats, slopes_of, without_gradient
from fastrl.ops._rows import active_rows, counted_rows
from fastrl.ops._vocabulary_parts.agreement import Agreement, agreement_of
from fastrl.ops._vocabulary_parts.parts import WHOLE, VocabularyParts, group_of, local_part
from fastrl.ops._vocabulary_parts.statistics import (
    PartRows,
    combined,
    gradient_arguments,
    part_stats,
    write_part_gradient,
)
from fastrl.tracing import refuse_transforms


def split_logits(
    logits: object, vocab_group: object, inplace: str, requested: object
) -> tuple[Any, Agreement | None]:
    """Return this rank's part of the logits, and the agreement if the vocabulary is split.

    `inplace` is the name of the option that lets the gradient overwrite the logits.

    Raises:
        TypeError: a DTensor that is not split by its last dimension alone, over a mesh `tp`.
        ValueError: a DTensor that may be overwritten.
    """
    agreement = agreement_of(vocab_group)
    if agreement is not None:
        group_of("logits", logits, agreement.group, dim=-1)
    if is_sharded(logits):
        if agreement is None:
            raise TypeError(
                "logits must be a plain tensor, got a DTensor: pass its `to_local()`, with "
                "vocab_group if the vocabulary is split (a mesh of the one dimension `tp` needs "
                "neither), or its `full_tensor()`"
            )
        if requested:  # autograd would not notice another use of the DTensor
            raise ValueError(
                f"{inplace}=True needs a plain tensor, got a DTensor: pass its `to_local()` and "
                "vocab_group"
            )
    return (logits, None) if agreement is None else (local_part(logits), agreement)


def parts_of_logits(
    logits: Tensor, rows: RowArguments, agreement: Agreement | None, backend: str
) -> VocabularyParts:
    """Exchange the sizes of the parts `[B, T, V]` once everything has been checked."""
    if agreement is None:
        return WHOLE
    return agreement.parts(logits.shape[-1], counted_rows(rows), backend)


def stats_of_part(
    logits: Tensor,
    rows: RowArguments,
    parts: VocabularyParts,
    backend: str,
    *,
    with_entropy: bool,
    with_sum_sq_probs: bool,
    inplace_backward: bool,
) -> tuple[Tensor, ...]:
    """Return the fields of `TokenStats` of the whole rows, `[B, T]` and differentiable.

    The logits `[B, T, V]` have stride 1 in the vocabulary.
    """
    refuse_transforms("a function of a split vocabulary")
    active = active_rows(rows, sum(parts.sizes))
    part = PartRows.of(rows, active, parts)
    return cast(
        "tuple[Tensor, ...]",
        _PartTokenStats.apply(  # type: ignore[no-untyped-call]
            logits, part, parts, with_entropy, with_sum_sq_probs, inplace_backward, backend
        ),
    )


class _PartTokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        part: PartRows,
        parts: VocabularyParts,
        with_entropy: bool,
        with_sum_sq_probs: bool,
        inplace_backward: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        local = part_stats(
            logits, part, backend, with_entropy=with_entropy, with_sum_sq_probs=with_sum_sq_probs
        )
        stats = combined(gathered(local, parts.process_group()), part)
        rows = part.rows
        ctx.save_for_backward(
            logits, rows.token_ids, rows.mask, rows.temperatures, part.own, part.known, *stats
        )
        ctx.rows = rows._replace(token_ids=None, mask=None, temperatures=None)  # type: ignore[arg-type]
        ctx.inplace_backward, ctx.backend = inplace_backward, backend
        ctx.mark_non_differentiable(*without_gradient(stats))
        ctx.set_materialize_grads(False)
        return public_stats(stats)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, token_ids, mask, temperatures, own, known, *saved = ctx.saved_tensors
        rows = ctx.rows._replace(token_ids=token_ids, mask=mask, temperatures=temperatures)
        part, stats = PartRows(rows, own, known), RowStats._make(saved)
        if ctx.inplace_backward and not torch.compiler.is_compiling():
            write_part_gradient(logits, part, stats, slopes_of(grads), ctx.backend)
            # makes autograd raise if another node has saved the logits
            torch.autograd.graph.increment_version(logits)
            gradient = logits.detach()
        else:
            gradient = _part_gradient(logits, part, stats, slopes_of(grads), ctx.backend)
        return (gradient, *([None] * 6))


def _part_gradient(
    logits: Tensor,
    part: PartRows,
    stats: RowStats,
    grads: Sequence[Tensor | None],
    backend: str,
) -> Tensor:
    slopes = part.slopes(grads)
    if backend == "reference":
        return reference.token_gradient(
            logits, part.rows, part.active(), stats, slopes, is_part=True
        )
    arguments = gradient_arguments(part, stats, slopes)
    return cast("Tensor", operators(backend).token_stats_bwd(logits, *arguments))
