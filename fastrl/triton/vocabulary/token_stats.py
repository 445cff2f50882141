"""Log-probability, entropy and other statistics of tokens from logits, and their gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.contract import FLAGS, RowArguments, RowStats, SavedStats
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
    EVEN,
    PER_TOKEN,
    RUN_TIME,
    exact_value,
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


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=PER_TOKEN)
def token_stats_fwd_kernel(
    logits, token_ids, mask, ignore_index: tl.int64, temperatures, scale, squash,
    length, stride_b: tl.int64, stride_t: tl.int64, vocabulary, partial_sums, of_tokens,
    out, SPEC: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids + index)
    if row_counts(index, token_id, mask, ignore_index):
        gain, binary_gain = row_gain(index, temperatures, scale, True)
        row = row_start(logits, index, length, stride_b, stride_t, SPEC)
        token = token_column(token_id, vocabulary)
        if partial_sums is None:
            x = token_logit(row, token, True)
        else:
            x = tl.load(of_tokens + index * OF_TOKEN)
        others = row_sums(
            row, partial_sums, of_tokens, index, token, vocabulary, binary_gain, squash, SPEC
        )
        sums, stats = row_statistics(others, x, token, binary_gain, squash, SPEC)
        top = exact_value(stats.row_max, squash, SPEC)
        logprob = token_logprob(x, stats.row_max, stats.log_sum, gain, squash, SPEC)
        logsumexp = tl.fma(top, gain, stats.log_sum)
        tl.store(out.logprobs + index, logprob)
        tl.store(out.entropy + index, stats.entropy if SPEC.entropy else 0.0)
        tl.store(out.logsumexp + index, tl.where(sums.s == 0, float("-inf"), logsumexp))
        tl.store(out.sum_sq_probs + index, sums.ss / sums.s / sums.s if SPEC.squares else 0.0)
        is_top1 = exact_value(x, squash, SPEC) >= top
        if SPEC.softcap:  # under a softcap -inf has a value, too
            is_top1 = is_top1 & ((x != float("-inf")) | (stats.row_max == float("-inf")))
        tl.store(out.is_top1 + index, is_top1)
        tl.store(out.row_max + index, stats.row_max)
        tl.store(out.log_sum + index, stats.log_sum)
    else:
        tl.store(out.logprobs + index, 0.0)
        tl.store(out.entropy + index, 0.0)
        tl.store(out.logsumexp + index, 0.0)
        tl.store(out.sum_sq_probs + index, 0.0)
        tl.store(out.is_top1 + index, False)
        tl.store(out.row_max + index, 0.0)
        tl.store(out.log_sum + index, 0.0)


def token_stats_fwd(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *of_rows, with_entropy, with_sum_sq_probs = arguments
    rows = RowArguments._make(of_rows)
    out = RowStats._make(
        torch.empty_like(rows.token_ids, dtype=torch.bool if name in FLAGS else torch.float32)
        for name in RowStats._fields
    )
    if rows.token_ids.numel():
        given = row_arguments(logits, rows)
        options = launch_options(
            logits, softcap=rows.logit_softcap, entropy=with_entropy, squares=with_sum_sq_probs
        )
        partial_sums = of_tokens = None
        if splits_of(logits) > 1:
            partial_sums, of_tokens = sums_of_blocks(given, options)
        token_stats_fwd_kernel[(rows.token_ids.numel(),)](
            **given, partial_sums=partial_sums, of_tokens=of_tokens, out=out, **options
        )
    return tuple(out)


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=PER_TOKEN)
def token_stats_bwd_kernel(
    logits, token_ids, mask, ignore_index: tl.int64, temperatures, scale, squash,
    length, stride_b: tl.int64, stride_t: tl.int64, vocabulary,
    row_max, log_sum, entropy, grad_logprobs, grad_entropy, grad_logsumexp,
    grad, grad_stride_b: tl.int64, grad_stride_t: tl.int64, splits, SPEC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    index = program // splits
    split = (program - index * splits).to(tl.int32)
    row = row_start(logits, index, length, stride_b, stride_t, SPEC)
    grad_row = row_start(grad, index, length, grad_stride_b, grad_stride_t, SPEC)
    token_id = tl.load(token_ids + index)
    of_logprob, of_entropy, of_logsumexp = 0.0, 0.0, 0.0
    if grad_logprobs is not None:
        of_logprob = tl.load(grad_logprobs + index)
    if grad_entropy is not None:
        of_entropy = tl.load(grad_entropy + index)
    if grad_logsumexp is not None:
        of_logsumexp = tl.load(grad_logsumexp + index)
    has_gradient = row_counts(index, token_id, mask, ignore_index)
    has_gradient &= (of_logprob != 0) | (of_entropy != 0) | (of_logsumexp != 0)
    slopes = Slopes(of_logprob, of_entropy, of_logsumexp)
    gain, binary_gain = row_gain(index, temperatures, scale, has_gradient)
    stats = Statistics(tl.load(row_max + index), tl.load(log_sum + index), tl.load(entropy + index))
    token = token_column(token_id, vocabulary)
    row_gradient(
        row, grad_row, has_gradient, token, None, stats, slopes, vocabulary, gain, binary_gain,
        squash, split, splits, SPEC,
    )  # fmt: skip


def _write_gradient(grad: Tensor, logits: Tensor, *arguments: Any) -> None:
    of_rows = len(RowArguments._fields)
    rows, saved = RowArguments._make(arguments[:of_rows]), SavedStats._make(arguments[of_rows:])
    if not grad.numel():
        return
    splits = splits_of(logits, EVEN) if grad.dtype == logits.dtype else 1
    options = launch_options(
        logits, grad, softcap=rows.logit_softcap, entropy=saved.grad_entropy is not None
    )
    options["SPEC"] = options["SPEC"]._replace(width=16 // grad.element_size())
    token_stats_bwd_kernel[(rows.token_ids.numel() * splits,)](
        **row_arguments(logits, rows),
        **saved._asdict(),
        grad=grad,
        grad_stride_b=grad.stride(0),
        grad_stride_t=grad.stride(1),
        splits=splits,
        **options,
    )


def token_stats_bwd(logits: Tensor, *arguments: Any) -> Tensor:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(grad, logits, *arguments)
    return grad


def token_stats_bwd_(logits: Tensor, *arguments: Any) -> None:
    *others, narrow = arguments
    _write_gradient(narrowed(logits) if narrow else logits, logits, *others)
