"""The divergence of rows of logits from a teacher's, and the gradient of the student's rows.

With q of the student and p of the teacher, everything is made of y = log2 q/p, which is computed
from the logits themselves, of the larger of the two, and of expm1(-|ln q/p|): where the rows are
almost equal, their differences keep their digits. `csrc/cpu/vocabulary/divergence_blocks.h` has the
same names.

One program goes through both rows. The backward begins at their end, as in `row_gradient.py`: the
end of the row may be in cache, and a narrow gradient overwrites only what has been read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.contract import RowArguments
from fastrl.triton.vocabulary.row_gradient import Slopes, _token_gradient
from fastrl.triton.vocabulary.row_sums import Statistics, log1p
from fastrl.triton.vocabulary.rows import (
    LN2,
    LOG2E,
    PER_TOKEN,
    RUN_TIME,
    at_least,
    exact_difference,
    launch_options,
    narrowed,
    row_arguments,
    row_counts,
    row_gain,
    row_start,
    token_column,
    token_logit,
    value,
)

#: Columns that a lane takes in one step.
COLUMNS = tl.constexpr(8)
MOST_LANES = 256
FORWARD_KL = tl.constexpr(0)
REVERSE_KL = tl.constexpr(1)
JENSEN_SHANNON = tl.constexpr(2)

OF_ROWS = (*RUN_TIME, "teacher_stride_b", "teacher_stride_t")
OF_TOKENS = (*PER_TOKEN, "teacher_temperatures", "stats", "upstream")


class BothStats(NamedTuple):
    """Per token, from both forwards."""

    row_max: Any
    log_sum: Any
    teacher_row_max: Any
    teacher_log_sum: Any


class Upstream(NamedTuple):
    """Per token, what the gradient is made of beside `BothStats`."""

    entropy: Any
    slope_mean: Any
    divergence: Any  # the derivatives of the loss, this one and the following
    logprob: Any
    of_entropy: Any
    logsumexp: Any


class DivergenceMap(NamedTuple):
    """What turns the logits of both rows into log2 of probabilities, and into log2 q/p."""

    multiplier: Any
    squash: Any
    max: Any  # of v
    log2_sum: Any
    teacher_multiplier: Any
    teacher_squash: Any
    teacher_max: Any
    teacher_log2_sum: Any
    same: Any  # whether z is the same function of the logit in both rows
    offset: Any  # then y is (u - v) * multiplier - offset
    alone: Any  # y is 0, whatever the teacher's logits are


class RowPair(NamedTuple):
    """The same columns of both rows."""

    y: Any  # log2 q/p
    log2_q: Any
    larger: Any  # of q and p
    growth: Any  # the smaller one is larger * (1 + growth)
    student_leads: Any  # q >= p
    q: Any
    p: Any
    agrees: Any  # both logits are as large as the largest


class DivergenceTerms(NamedTuple):
    """What a column adds to the divergence, and q times the derivative of that sum by ln q."""

    value: Any
    slope: Any


@triton.jit
def divergence_map(
    index, stats, multiplier, squash, teacher_multiplier, teacher_squash, alone,
    SPEC: tl.constexpr, TEACHER_SPEC: tl.constexpr,
):  # fmt: skip
    row_max, log_sum = tl.load(stats.row_max + index), tl.load(stats.log_sum + index)
    teacher_row_max = tl.load(stats.teacher_row_max + index)
    teacher_log_sum = tl.load(stats.teacher_log_sum + index)
    ahead = exact_difference(row_max, teacher_row_max, squash, SPEC) * multiplier
    return DivergenceMap(
        multiplier,
        squash,
        value(row_max, squash, SPEC),
        log_sum * LOG2E,
        teacher_multiplier,
        teacher_squash,
        value(teacher_row_max, teacher_squash, TEACHER_SPEC),
        teacher_log_sum * LOG2E,
        (multiplier == teacher_multiplier) & (squash == teacher_squash),
        ahead + (log_sum - teacher_log_sum) * LOG2E,
        alone,
    )


@triton.jit
def _growth(t):
    """Return 2^t - 1 for t <= 0, by its series where the difference would cancel."""
    x = t * LN2
    tail = tl.fma(tl.fma(tl.fma(x, 1 / 5040, 1 / 720), x, 1 / 120), x, 1 / 24)
    series = tl.fma(tl.fma(tl.fma(tail, x, 1 / 6), x, 0.5), x, 1.0)
    return tl.where(t > -0.75, series * x, tl.exp2(t) - 1.0)


@triton.jit
def _log2_probability(x, v, largest, multiplier, log2_sum, SPEC: tl.constexpr):
    t = (v - largest) * multiplier - log2_sum
    if SPEC.softcap:  # under which -inf has a value
        t = tl.where(x == float("-inf"), float("-inf"), t)
    return t


@triton.jit
def _is_largest(x, v, largest, SPEC: tl.constexpr):
    """Return whether the value under the softcap is the largest; v has more digits than tanh."""
    if SPEC.softcap:
        return (v + 0.5 == largest + 0.5) & (x != float("-inf"))
    return v == largest


@triton.jit
def compare(x, x_teacher, to, SPEC: tl.constexpr, TEACHER_SPEC: tl.constexpr):
    u = value(x, to.squash, SPEC)
    v = value(x_teacher, to.teacher_squash, TEACHER_SPEC)
    log2_q = _log2_probability(x, u, to.max, to.multiplier, to.log2_sum, SPEC)
    log2_p = _log2_probability(
        x_teacher, v, to.teacher_max, to.teacher_multiplier, to.teacher_log2_sum, TEACHER_SPEC
    )
    ahead, near = u - v, to.same
    if SPEC.softcap:  # 1 / (1 + b) - 1 / (1 + a) = b / (1 + b) / (1 + a) (a / b - 1)
        distance = tl.abs(x - x_teacher) * to.squash
        near = tl.where(near, distance, 1.0) < 0.75  # elsewhere v has the digits
        ahead = tl.minimum(u, v) * (1.0 + tl.maximum(u, v)) * _growth(-distance)
        ahead = tl.where(x < x_teacher, -ahead, ahead)
    y = tl.where(near, ahead * to.multiplier - to.offset, log2_q - log2_p)
    excluded = (x == float("-inf")) & (x_teacher == float("-inf"))
    y = tl.where(to.alone, 0.0, tl.where(excluded, 0.0, y))
    student_leads = y >= 0
    larger = tl.exp2(tl.where(student_leads, log2_q, log2_p))
    growth = _growth(-tl.abs(y))
    smaller = tl.fma(larger, growth, larger)
    q = tl.where(student_leads, larger, smaller)
    p = tl.where(student_leads, smaller, larger)
    agrees = _is_largest(x, u, to.max, SPEC)
    agrees &= _is_largest(x_teacher, v, to.teacher_max, TEACHER_SPEC)
    return RowPair(y, log2_q, larger, growth, student_leads, q, p, agrees)


@triton.jit
def _product_or_zero(probability, log):
    return tl.where(probability == 0, 0.0, probability * log)


@triton.jit
def divergence_terms(pair, beta, KIND: tl.constexpr):
    log_ratio = pair.y * LN2  # ln q/p
    change = pair.larger * pair.growth
    excess = tl.where(pair.student_leads, -change, change)  # q - p
    if KIND == FORWARD_KL:
        term, slope = excess - _product_or_zero(pair.p, log_ratio), excess
    elif KIND == REVERSE_KL:
        slope = _product_or_zero(pair.q, log_ratio)
        term = slope - excess
    else:  # with m = (1 - beta) q + beta p
        share = tl.where(pair.student_leads, beta, 1.0 - beta)
        of_larger = -log1p(share * pair.growth)  # ln larger/m
        of_smaller = of_larger - tl.abs(log_ratio)
        of_q = tl.where(pair.student_leads, of_larger, of_smaller)
        of_p = tl.where(pair.student_leads, of_smaller, of_larger)
        slope = (1.0 - beta) * _product_or_zero(pair.q, of_q)
        term = tl.fma(beta, _product_or_zero(pair.p, of_p), slope)
    return DivergenceTerms(term, slope)


@triton.jit
def _load(row, columns, vocabulary):
    return tl.load(row + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize=OF_ROWS, do_not_specialize_on_alignment=OF_TOKENS)
def divergence_fwd_kernel(
    logits, token_ids, mask, ignore_index: tl.int64, temperatures, scale, squash,
    length, stride_b: tl.int64, stride_t: tl.int64, vocabulary,
    teacher_logits, teacher_temperatures, teacher_scale, teacher_squash,
    teacher_stride_b: tl.int64, teacher_stride_t: tl.int64,
    stats, beta, divergence, slope_mean, agrees,
    KIND: tl.constexpr, SPEC: tl.constexpr, TEACHER_SPEC: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = COLUMNS * SPEC.lanes
    index = tl.program_id(0).to(tl.int64)
    if row_counts(index, tl.load(token_ids + index), mask, ignore_index):
        row = row_start(logits, index, length, stride_b, stride_t, SPEC)
        teacher = row_start(
            teacher_logits, index, length, teacher_stride_b, teacher_stride_t, TEACHER_SPEC
        )
        _, multiplier = row_gain(index, temperatures, scale, True)
        _, teacher_multiplier = row_gain(index, teacher_temperatures, teacher_scale, True)
        to = divergence_map(
            index, stats, multiplier, squash, teacher_multiplier, teacher_squash, False,
            SPEC, TEACHER_SPEC,
        )  # fmt: skip
        values, slopes = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        agreeing = tl.zeros([BLOCK], tl.int1)
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _load(row, columns, vocabulary)
            x_teacher = _load(teacher, columns, vocabulary)
            pair = compare(x, x_teacher, to, SPEC, TEACHER_SPEC)
            terms = divergence_terms(pair, beta, KIND)
            values += terms.value
            slopes += terms.slope
            agreeing |= pair.agrees
        total = tl.sum(values, axis=0)
        tl.store(divergence + index, tl.where(total < 0, 0.0, total))
        tl.store(slope_mean + index, tl.sum(slopes, axis=0))
        tl.store(agrees + index, tl.max(agreeing.to(tl.int32), axis=0) != 0)
    else:
        tl.store(divergence + index, 0.0)
        tl.store(slope_mean + index, 0.0)
        tl.store(agrees + index, False)


@triton.jit(do_not_specialize=OF_ROWS, do_not_specialize_on_alignment=OF_TOKENS)
def divergence_bwd_kernel(
    logits, token_ids, mask, ignore_index: tl.int64, temperatures, scale, squash,
    length, stride_b: tl.int64, stride_t: tl.int64, vocabulary,
    teacher_logits, teacher_temperatures, teacher_scale, teacher_squash,
    teacher_stride_b: tl.int64, teacher_stride_t: tl.int64,
    stats, beta, upstream, grad, grad_stride_b: tl.int64, grad_stride_t: tl.int64,
    KIND: tl.constexpr, SPEC: tl.constexpr, TEACHER_SPEC: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = COLUMNS * SPEC.lanes
    index = tl.program_id(0).to(tl.int64)
    row = row_start(logits, index, length, stride_b, stride_t, SPEC)
    grad_row = row_start(grad, index, length, grad_stride_b, grad_stride_t, SPEC)
    token_id = tl.load(token_ids + index)
    of_divergence = tl.load(upstream.divergence + index)
    of_logprob, of_entropy, of_logsumexp = 0.0, 0.0, 0.0
    if upstream.logprob is not None:
        of_logprob = tl.load(upstream.logprob + index)
    if upstream.of_entropy is not None:
        of_entropy = tl.load(upstream.of_entropy + index)
    if upstream.logsumexp is not None:
        of_logsumexp = tl.load(upstream.logsumexp + index)
    alone = of_divergence == 0
    has_gradient = row_counts(index, token_id, mask, ignore_index)
    has_gradient &= (
        (of_divergence != 0) | (of_logprob != 0) | (of_entropy != 0) | (of_logsumexp != 0)
    )
    blocks = tl.cdiv(vocabulary, BLOCK)
    if has_gradient:
        teacher = row_start(
            teacher_logits, index, length, teacher_stride_b, teacher_stride_t, TEACHER_SPEC
        )
        gain, multiplier = row_gain(index, temperatures, scale, True)
        _, teacher_multiplier = row_gain(index, teacher_temperatures, teacher_scale, True)
        to = divergence_map(
            index, stats, multiplier, squash, teacher_multiplier, teacher_squash, alone,
            SPEC, TEACHER_SPEC,
        )  # fmt: skip
        mean = tl.where(of_divergence == 0, 0.0, tl.load(upstream.slope_mean + index))
        entropy = tl.load(upstream.entropy + index)
        saved = Statistics(tl.load(stats.row_max + index), tl.load(stats.log_sum + index), entropy)
        chain = gain
        if SPEC.softcap:
            chain = gain * squash * LN2
        token = token_column(token_id, vocabulary)
        x_token = token_logit(row, token, True)
        slopes = Slopes(of_logprob, of_entropy, of_logsumexp)
        at_token = _token_gradient(x_token, saved, slopes, gain, squash, SPEC) * chain
        of_token = tl.where((token >= 0) | (of_logprob == 0), of_logprob, float("nan"))
        constant, linear = of_logsumexp - of_token, 0.0
        if SPEC.entropy:
            constant, linear = constant - of_entropy * entropy, -LN2 * of_entropy
        tl.debug_barrier()  # everyone has read the token's logit before anyone overwrites it
        for i in range(blocks):
            columns = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
            x = _load(row, columns, vocabulary)
            x_teacher = _load(teacher, columns, vocabulary)
            if grad.dtype.element_ty != logits.dtype.element_ty:
                tl.debug_barrier()  # the gradient may overwrite what others read of this block
            pair = compare(x, x_teacher, to, SPEC, TEACHER_SPEC)
            slope = divergence_terms(pair, beta, KIND).slope - _product_or_zero(pair.q, mean)
            of_row = constant
            if SPEC.entropy:
                of_row = tl.fma(at_least(pair.log2_q), linear, constant)
            is_token = columns == token
            g = tl.fma(slope, of_divergence, tl.where(is_token, 0.0, pair.q * of_row)) * chain
            if SPEC.softcap:
                v = value(x, squash, SPEC)
                g *= tl.fma(-v, v, -v)
            g += tl.where(is_token, at_token, 0.0)
            place = grad_row + columns
            tl.store(place, g.to(grad.dtype.element_ty), mask=columns < vocabulary)
    else:
        for i in range(blocks):
            columns = i * BLOCK + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], grad.dtype.element_ty)
            tl.store(grad_row + columns, zeros, mask=columns < vocabulary)


def _launch(
    kernel: Any, logits: Tensor, teacher_logits: Tensor, of_rows: tuple[Any, ...], beta: float,
    *written: Tensor, entropy: bool = False, **others: Any,
) -> None:  # fmt: skip
    """Launch one program per row; `written` is what is stored in the layout of the logits."""
    rows = RowArguments._make(of_rows[: len(RowArguments._fields)])
    scaling = of_rows[len(RowArguments._fields) :]
    teacher = row_arguments(teacher_logits, RowArguments(*rows[:3], *scaling))
    for name in ("logits", "temperatures", "scale", "squash", "stride_b", "stride_t"):
        others[f"teacher_{name}"] = teacher[name]
    options = launch_options(logits, *written, softcap=rows.logit_softcap, entropy=entropy)
    of_teacher = launch_options(teacher_logits, softcap=scaling[-1])
    lanes = min(options["SPEC"].lanes, MOST_LANES)
    # the other fields are not used here, and would only lead to further compilations
    used = {"lanes": lanes, "width": 0, "edges": False, "together": False}
    options["SPEC"] = options["SPEC"]._replace(**used)
    options["num_warps"] = max(1, lanes // (64 if torch.version.hip else 32))
    kernel[(rows.token_ids.numel(),)](
        **row_arguments(logits, rows),
        **others,
        beta=beta,
        KIND=0 if beta == 0 else 1 if beta == 1 else 2,
        TEACHER_SPEC=of_teacher["SPEC"]._replace(**used),
        **options,
    )


def divergence_fwd(
    logits: Tensor, teacher_logits: Tensor, token_ids: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *of_rows, row_max, log_sum, teacher_row_max, teacher_log_sum, beta = arguments
    divergence = torch.empty_like(token_ids, dtype=torch.float32)
    slope_mean = torch.empty_like(divergence)
    agrees = torch.empty_like(token_ids, dtype=torch.bool)
    if token_ids.numel():
        stats = BothStats(row_max, log_sum, teacher_row_max, teacher_log_sum)
        of_pair = (logits, teacher_logits, (token_ids, *of_rows), beta)
        out: dict[str, Any] = {"slope_mean": slope_mean, "agrees": agrees}
        _launch(divergence_fwd_kernel, *of_pair, stats=stats, divergence=divergence, **out)
    return divergence, slope_mean, agrees


def _write_gradient(grad: Tensor, logits: Tensor, teacher_logits: Tensor, *others: Any) -> None:
    *of_rows, row_max, log_sum, entropy, teacher_row_max, teacher_log_sum, beta = others[:-5]
    if grad.numel():
        _launch(
            divergence_bwd_kernel,
            logits,
            teacher_logits,
            tuple(of_rows),
            beta,
            grad,
            entropy=others[-2] is not None,
            stats=BothStats(row_max, log_sum, teacher_row_max, teacher_log_sum),
            upstream=Upstream(entropy, *others[-5:]),
            grad=grad,
            grad_stride_b=grad.stride(0),
            grad_stride_t=grad.stride(1),
        )


def divergence_bwd(logits: Tensor, *arguments: Any) -> Tensor:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(grad, logits, *arguments)
    return grad


def divergence_bwd_(logits: Tensor, *arguments: Any) -> None:
    *others, narrow = arguments
    _write_gradient(narrowed(logits) if narrow else logits, logits, *others)
