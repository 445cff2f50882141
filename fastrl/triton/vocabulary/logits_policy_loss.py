"""The policy loss from logits in one pass: statistics of a row, slope of its loss, gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.contract import Coefficients, LossArguments, ObjectiveArguments, RowArguments
from fastrl.triton.loss_constants import by_sequence, load_constant, load_weights
from fastrl.triton.objectives import (
    compiled_for,
    difference_of,
    kl_difference,
    kl_terms,
    objective_terms,
    token_slope,
    weighted,
)
from fastrl.triton.sequences import packed_sequence
from fastrl.triton.vocabulary.row_gradient import Slopes, row_gradient
from fastrl.triton.vocabulary.row_sums import (
    OF_TOKEN,
    Statistics,
    row_statistics,
    row_sums,
    sums_of_blocks,
    token_logprob,
)
from fastrl.triton.vocabulary.rows import (
    PER_TOKEN,
    RUN_TIME,
    launch_options,
    narrowed,
    row_arguments,
    row_counts,
    row_gain,
    row_start,
    splits_of,
    token_column,
    token_logit,
)


@triton.jit
def _slopes(
    logprob, index, length, sequences, loss, c, BY_SEQUENCE: tl.constexpr,
    SURROGATE: tl.constexpr, KL_ESTIMATOR: tl.constexpr, KL_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Return dL/dlogprob and dL/dentropy of a row, the only values that depend on the loss."""
    if loss.cu_seqlens is None:
        sequence = index // length
    else:
        sequence = packed_sequence(index, loss.cu_seqlens, sequences)
    weights = load_weights(loss, BY_SEQUENCE, sequence, index, True, True)
    advantage = load_constant(loss.advantages, BY_SEQUENCE.advantages, sequence, index, True, True)
    old = logprob if loss.old_logprobs is None else tl.load(loss.old_logprobs + index)
    difference = difference_of(logprob, old)  # on policy the ratio is 1, but NaN stays NaN
    terms = objective_terms(SURROGATE, difference, advantage, logprob, c)
    slope = weighted(weights.policy, terms.slope)
    if KL_ESTIMATOR is not None:
        ref_minus_logprob = kl_difference(tl.load(loss.ref_logprobs + index), logprob)
        kl = kl_terms(KL_ESTIMATOR, KL_GRADIENT, ref_minus_logprob, difference, c)
        slope += c.kl_coef * weights.kl * kl.own_slope
    return token_slope(logprob, slope), -c.entropy_coef * weights.entropy


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=PER_TOKEN)
def logits_policy_loss_kernel(
    logits, token_ids, mask, ignore_index: tl.int64, temperatures, scale, squash,
    length, stride_b: tl.int64, stride_t: tl.int64, vocabulary, partial_sums, of_tokens,
    loss, sequences, c, logprobs, entropies,
    grad, grad_stride_b: tl.int64, grad_stride_t: tl.int64, splits, BY_SEQUENCE: tl.constexpr,
    SURROGATE: tl.constexpr, KL_ESTIMATOR: tl.constexpr, KL_GRADIENT: tl.constexpr,
    SPEC: tl.constexpr, GRADIENT_SPEC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    index = program // splits
    split = (program - index * splits).to(tl.int32)
    row = row_start(logits, index, length, stride_b, stride_t, SPEC)
    grad_row = row_start(grad, index, length, grad_stride_b, grad_stride_t, GRADIENT_SPEC)
    token_id = tl.load(token_ids + index)
    counts = row_counts(index, token_id, mask, ignore_index)
    gain, binary_gain = row_gain(index, temperatures, scale, counts)
    token = token_column(token_id, vocabulary)
    if partial_sums is None:
        x = token_logit(row, token, counts)
    else:
        x = tl.load(of_tokens + index * OF_TOKEN, mask=counts, other=0.0)
    logprob, entropy, row_max, log_sum, of_logprob, of_entropy = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    if counts:
        others = row_sums(
            row, partial_sums, of_tokens, index, token, vocabulary, binary_gain, squash, SPEC
        )
        _, stats = row_statistics(others, x, token, binary_gain, squash, SPEC)
        row_max, log_sum, entropy = stats.row_max, stats.log_sum, stats.entropy
        logprob = token_logprob(x, row_max, log_sum, gain, squash, SPEC)
        of_logprob, of_entropy = _slopes(
            logprob, index, length, sequences, loss, c, BY_SEQUENCE,
            SURROGATE, KL_ESTIMATOR, KL_GRADIENT,
        )  # fmt: skip
    if split == 0:
        tl.store(logprobs + index, logprob)
        tl.store(entropies + index, entropy)
    has_gradient = counts & ((of_logprob != 0) | (of_entropy != 0))
    stats = Statistics(row_max, log_sum, entropy)
    slopes = Slopes(of_logprob, of_entropy, 0.0)
    row_gradient(
        row, grad_row, has_gradient, token, x, stats, slopes, vocabulary, gain, binary_gain,
        squash, split, splits, GRADIENT_SPEC,
    )  # fmt: skip


def _one_pass(grad: Tensor, logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    given = iter(arguments)
    rows = RowArguments._make(next(given) for _ in RowArguments._fields)
    loss = LossArguments._make(next(given) for _ in LossArguments._fields)
    objective = ObjectiveArguments._make(given)
    c = Coefficients._make(objective.coefficients)
    logprobs = torch.empty_like(rows.token_ids, dtype=torch.float32)
    entropies = torch.empty_like(rows.token_ids, dtype=torch.float32)
    if not rows.token_ids.numel():
        return logprobs, entropies
    which = by_sequence(loss)
    if not any(which):
        loss = loss._replace(cu_seqlens=None)
    of_rows = row_arguments(logits, rows)
    options = launch_options(logits, grad, softcap=rows.logit_softcap, entropy=True)
    splits = splits_of(logits) if grad.dtype == logits.dtype else 1
    partial_sums, of_tokens = None, None
    if splits > 1:
        partial_sums, of_tokens = sums_of_blocks(of_rows, options)
    constants = compiled_for(objective)
    if not c.kl_coef:
        constants["KL_ESTIMATOR"] = None
    logits_policy_loss_kernel[(rows.token_ids.numel() * splits,)](
        **of_rows,
        partial_sums=partial_sums,
        of_tokens=of_tokens,
        loss=loss,
        sequences=0 if loss.cu_seqlens is None else loss.cu_seqlens.shape[0] - 1,
        c=c,
        logprobs=logprobs,
        entropies=entropies,
        grad=grad,
        grad_stride_b=grad.stride(0),
        grad_stride_t=grad.stride(1),
        splits=splits,
        BY_SEQUENCE=which,
        GRADIENT_SPEC=options["SPEC"]._replace(
            entropy=c.entropy_coef != 0, width=16 // grad.element_size()
        ),
        **constants,
        **options,
    )
    return logprobs, entropies


def logits_policy_loss_fwd(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return *_one_pass(grad, logits, *arguments), grad


def logits_policy_loss_fwd_(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *others, narrow = arguments
    return _one_pass(narrowed(logits) if narrow else logits, logits, *others)
