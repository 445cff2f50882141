"""Checks of the arguments that the linear forms share, and their conversion for operators."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend import resolve
from fastrl.checks import flag, floating, whole
from fastrl.contract import RowArguments
from fastrl.ops._arguments import (
    NO_SAMPLER,
    KeptArguments,
    RowInputs,
    SamplerArguments,
    Source,
    TeacherArguments,
    each_tensor,
)
from fastrl.ops._head.head import LinearHead, as_head
from fastrl.ops._head.tensor_cores import gemm_dtype
from fastrl.ops._row_checks import as_rows, counted_rows
from fastrl.ops._vocabulary_parts.agreement import agreement_of
from fastrl.ops._vocabulary_parts.parts import UNSPLIT, group_of
from fastrl.ops.kept_tokens import kept_arguments
from fastrl.ops.teacher import teacher_arguments, with_operand_dtype
from fastrl.tracing import refuse_transforms


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
    checked_teacher = teacher_arguments(teacher, rows, padded, head.vocabulary, agreement, kept)
    return CheckedInputs(padded, rows, counted_rows(rows), head, sets, checked_teacher)


def hidden_inputs(
    checked: CheckedInputs,
    options: ChunkOptions,
    vocab_group: object,
    *,
    with_entropy: bool = True,
    with_sum_sq_probs: bool = False,
    sampler: SamplerArguments = NO_SAMPLER,
) -> RowInputs:
    """Return the inputs of the operators.

    The ranks of a split vocabulary meet here, so everything else must be checked before.
    """
    hidden, rows, active, head, kept, teacher = checked
    agreement, backend = agreement_of(vocab_group), options.backend
    parts = UNSPLIT if agreement is None else agreement.parts(head.vocabulary, active, backend)
    states = hidden.reshape(-1, hidden.shape[-1])
    return RowInputs(
        Source(None, states, *head.parameters(), head.lora_scale, options.operand_dtype),
        rows.token_ids.reshape(1, -1),
        active.reshape(1, -1),
        each_tensor(lambda x: x.reshape(1, -1), rows.scaling()),
        with_entropy,
        with_sum_sq_probs,
        options.chunk_tokens,
        options.compact,
        backend,
        parts,
        kept,
        with_operand_dtype(teacher, backend),
        sampler,
    )


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
