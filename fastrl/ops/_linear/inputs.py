"""Checks of the arguments that the linear forms share, and their conversion for operators."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend import resolve
from fastrl.checks import flag, floating, whole
from fastrl.contract import RowArguments
from fastrl.ops._kept.rows import KeptArguments
from fastrl.ops._linear.chunks import flat_rows
from fastrl.ops._linear.head import LinearHead, as_head
from fastrl.ops._linear.tensor_cores import gemm_dtype
from fastrl.ops._rows import as_rows, check_ids, counted_rows
from fastrl.ops._teacher.arguments import TeacherArguments
from fastrl.ops._vocabulary_parts.agreement import agreement_of
from fastrl.ops._vocabulary_parts.parts import WHOLE, VocabularyParts, group_of
from fastrl.ops.kept_tokens import kept_arguments
from fastrl.ops.teacher import teacher_arguments, with_operand_dtype
from fastrl.tracing import refuse_transforms


class LinearInputs(NamedTuple):
    """Hidden states `[N, H]`, rows `[N]` and the LM head, or a part of it."""

    hidden: Tensor
    rows: RowArguments
    head: LinearHead
    parts: VocabularyParts
    kept: KeptArguments
    teacher: TeacherArguments


class ChunkOptions(NamedTuple):
    """How a linear form is chunked and multiplied; `backend` is never `auto`."""

    chunk_tokens: int | None
    compact: bool
    backend: str
    operand_dtype: torch.dtype | None


class CheckedInputs(NamedTuple):
    """Hidden states `[B, T, H]`, rows `[B, T]`, the mask of active rows, and the LM head."""

    hidden: Tensor
    rows: RowArguments
    active: Tensor
    head: LinearHead
    kept: KeptArguments
    teacher: TeacherArguments


def checked_inputs(
    hidden: object,
    weight: object,
    token_ids: Tensor,
    bias: object,
    lora: object,
    mask: object,
    temperature: object,
    logit_scale: object,
    logit_softcap: object,
    ignore_index: object,
    vocab_group: object,
    reduce_hidden_gradient: object,
    kept: object,
    teacher: object = None,
) -> CheckedInputs:
    """Check the common arguments, but not that ids lie in the vocabulary."""
    refuse_transforms("a function of hidden states")
    states = floating("hidden", hidden)
    if states.dim() not in (2, 3) or states.shape[-1] == 0:
        raise ValueError(f"hidden must have shape [B, T, H] or [N, H], got {tuple(states.shape)}")
    agreement = agreement_of(vocab_group)
    group = None if agreement is None else group_of("weight", weight, agreement.group, dim=0)
    if not flag("reduce_hidden_gradient", reduce_hidden_gradient) and group is None:
        raise ValueError("reduce_hidden_gradient=False has no effect without vocab_group")
    head = as_head(states, weight, bias, lora, group)
    padded, rows = as_rows(
        states,
        token_ids,
        mask,
        temperature,
        logit_scale,
        logit_softcap,
        ignore_index,
        name="hidden",
        vocabulary=head.vocabulary if group is None else 1,
    )
    sets = kept_arguments(kept, rows.token_ids)
    of_teacher = teacher_arguments(
        teacher, rows, padded, head.vocabulary, agreement, kept, flat=True
    )
    return CheckedInputs(padded, rows, counted_rows(rows), head, sets, of_teacher)


def linear_inputs(checked: CheckedInputs, backend: str, vocab_group: object) -> LinearInputs:
    """Return the differentiable inputs of the operators.

    The ranks of a split vocabulary meet here, so everything else must be checked before.
    """
    hidden, rows, active, head, kept, teacher = checked
    teacher = with_operand_dtype(teacher, backend)
    agreement = agreement_of(vocab_group)
    parts = WHOLE if agreement is None else agreement.parts(head.vocabulary, active, backend)
    vocabulary = sum(parts.sizes) if parts.split() else head.vocabulary
    check_ids(rows, active, vocabulary)
    flat = flat_rows(rows._replace(mask=active))
    states = hidden.reshape(-1, hidden.shape[-1])
    return LinearInputs(states, flat, head, parts, kept, teacher)


def chunk_options(
    chunk_tokens: object,
    compact: object,
    backend: str,
    inputs: CheckedInputs,
    unsupported: str | None = None,
) -> ChunkOptions:
    """Check the options; choose the backend for the chunks and the dtype of its GEMMs.

    `unsupported` says why compiled kernels cannot evaluate the objective, or is None.
    """
    if chunk_tokens is not None:
        chunk_tokens = whole("chunk_tokens", chunk_tokens, low=1)
    head = inputs.head
    chosen = resolve(backend, head.weight.device, head.dtype, unsupported, partial=True)
    operand_dtype = gemm_dtype(inputs.hidden, head.weight, chosen)
    return ChunkOptions(chunk_tokens, flag("compact", compact), chosen, operand_dtype)
