"""Checks of given logits, and their differentiable statistics."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastrl import reference
from fastrl.checks import is_sharded
from fastrl.contract import CenteringStats, RowArguments
from fastrl.ops._arguments import (
    ALL_TOKENS,
    NO_SAMPLER,
    NO_SOURCE,
    NO_TEACHER,
    KeptArguments,
    RowInputs,
    SamplerArguments,
    TeacherArguments,
)
from fastrl.ops._lens.kept import check_kept
from fastrl.ops._row_checks import active_rows, counted_rows
from fastrl.ops._rows.autograd import KernelCall, differentiable_stats
from fastrl.ops._rows.reference import reference_stats
from fastrl.ops._rows.statistics import TokenStats
from fastrl.ops._vocabulary_parts.agreement import Agreement, agreement_of
from fastrl.ops._vocabulary_parts.parts import UNSPLIT, VocabularyParts, group_of, local_part
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
        return UNSPLIT
    return agreement.parts(logits.shape[-1], counted_rows(rows), backend)


def given_inputs(
    logits: Tensor,
    rows: RowArguments,
    parts: VocabularyParts,
    backend: str,
    *,
    with_entropy: bool,
    with_sum_sq_probs: bool = False,
    kept: KeptArguments = ALL_TOKENS,
    teacher: TeacherArguments = NO_TEACHER,
    sampler: SamplerArguments = NO_SAMPLER,
) -> RowInputs:
    """Return the inputs of the operators that loop over rows, for logits `[B, T, V]`."""
    return RowInputs(
        NO_SOURCE._replace(logits=with_unit_vocabulary_stride(logits)),
        rows.token_ids,
        counted_rows(rows),
        rows.scaling(),
        with_entropy,
        with_sum_sq_probs,
        None,
        True,
        backend,
        parts,
        kept,
        teacher,
        sampler,
    )


def stats_of_logits(
    logits: Tensor,
    rows: RowArguments,
    parts: VocabularyParts,
    backend: str,
    *,
    with_entropy: bool,
    with_sum_sq_probs: bool = False,
    kept: KeptArguments = ALL_TOKENS,
    teacher: TeacherArguments = NO_TEACHER,
    sampler: SamplerArguments = NO_SAMPLER,
    overwrite: bool = False,
    save_probs: bool = False,
) -> tuple[TokenStats, CenteringStats | None]:
    """Return all statistics, `[B, T]` and differentiable; those of a teacher are None without one.

    The sampler's come last.

    `overwrite` lets the gradient take the place of the logits, except on the reference backend;
    `save_probs` is for that one: see `reference_stats`.
    """
    on_reference = backend == "reference"
    accompanied = teacher.given() or parts.split() or sampler.given()
    if on_reference and not accompanied:
        active = active_rows(rows, logits.shape[-1])
        if kept.ids is not None and kept.offsets is not None:
            check_kept(kept, active.reshape(-1), logits.shape[-1])
            logits = reference.kept_logits(logits, rows.token_ids, kept.ids, kept.offsets)
        stats = reference_stats(
            logits,
            rows._replace(mask=active),
            with_entropy=with_entropy,
            with_sum_sq_probs=with_sum_sq_probs,
            save_probs=save_probs,
        )
        return stats, None
    refuse_transforms("this function on a compiled backend, with a teacher or with vocab_group")
    if kept.ids is None and not accompanied:
        call = KernelCall(rows, with_entropy, with_sum_sq_probs, backend)
        return differentiable_stats(call, with_unit_vocabulary_stride(logits), overwrite=overwrite)
    inputs = given_inputs(
        logits,
        rows,
        parts,
        backend,
        with_entropy=with_entropy,
        with_sum_sq_probs=with_sum_sq_probs,
        kept=kept,
        teacher=teacher,
        sampler=sampler,
    )
    overwrite = overwrite and not on_reference
    return differentiable_stats(inputs, *inputs.source.trainable(), overwrite=overwrite)


def with_unit_vocabulary_stride(logits: Tensor) -> Tensor:
    """Return logits with stride 1 in the vocabulary, copied if necessary."""
    strided = logits.stride(-1) != 1 and logits.shape[-1] > 1
    return logits.contiguous() if strided else logits
