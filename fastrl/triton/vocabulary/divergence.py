"""The divergence of a student's rows of logits from a teacher's, and the gradient of these rows.

With the student's distribution q and the teacher's p, everything is computed from y = log2 q/p,
which comes from the logits themselves, from the larger probability, and from expm1(-|ln q/p|), as
in csrc/cpu/vocabulary/divergence_blocks.h, so differences of nearly equal rows keep their digits.

One program goes through both rows; the gradient begins at their end, as in row_gradient.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.contract import RowArguments, ScalingArguments
from fastrl.triton.vocabulary.row_gradient import Slopes, token_gradient
from fastrl.triton.vocabulary.row_sums import Statistics
from fastrl.triton.vocabulary.rows import (
    LN2,
    LOG2E,
    PER_TOKEN,
    RUN_TIME,
    at_least,
    launch_options,
    narrowed,
    row_arguments,
    row_counts,
    row_gain,
    row_start,
    token_column,
    token_logit,
)

COLUMNS, MOST_LANES = tl.constexpr(8), 256  # columns of a lane in one step, and the most lanes
FORWARD_KL, REVERSE_KL = tl.constexpr(0), tl.constexpr(1)  # otherwise Jensen-Shannon
#: A log2 q/p of 2^50, as a logit of finfo.min makes it in one of the rows, becomes infinite.
OVERFLOWS, LN2_BELOW = tl.constexpr(2.0**78), tl.constexpr(LN2.value * 2.0**-78)
TINY = tl.constexpr(2.0**-126)

OF_PAIR = len(RowArguments._fields) + len(ScalingArguments._fields)
OF_TEACHER = ("logits", "temperatures", "scale", "squash", "stride_b", "stride_t")
OF_ROWS = (*RUN_TIME, "teacher_stride_b", "teacher_stride_t")
OF_TOKENS = (*PER_TOKEN, *(f"teacher_{n}" for n in PER_TOKEN), "slope_mean", "grad_divergence")


class DivergenceMap(NamedTuple):
    """The map from the logits of both rows to log2 of probabilities, and to log2 q/p."""

    binary_gain: Any
    squash: Any
    max: Any
    log2_sum: Any
    teacher_binary_gain: Any
    teacher_squash: Any
    teacher_max: Any
    teacher_log2_sum: Any
    same: Any  # whether z is the same function of the logit in both rows
    difference: Any  # then log2 q/p is (u - v - difference) * binary_gain - offset
    error: Any  # the rounding error of that difference
    offset: Any
    beta: Any
    student_share: Any
    turn: Any


@triton.jit
def _growth(t, power):
    """Return 2^t - 1 from 2^t, by its series where the difference would cancel."""
    x = t * LN2
    tail = tl.fma(tl.fma(tl.fma(x, 1 / 5040, 1 / 720), x, 1 / 120), x, 1 / 24)
    series = tl.fma(tl.fma(tl.fma(tail, x, 1 / 6), x, 0.5), x, 1.0)
    return tl.where(tl.abs(t) < 0.75, series * x, power - 1.0)


@triton.jit
def _squash(x, squash, SPEC: tl.constexpr):
    """Return v of a logit and dv/dx over squash ln 2; under a softcap v = tanh / 2, or -inf."""
    v, derivative = x, 1.0
    if SPEC.softcap:
        inside = -tl.abs(x * squash)
        shrinkage = _growth(inside, tl.exp2(inside))
        inverse = 1.0 / (2.0 + shrinkage)
        v = tl.where(x == float("-inf"), x, tl.where(x < 0, 0.5, -0.5) * shrinkage * inverse)
        derivative = (1.0 + shrinkage) * inverse * inverse
    return v, derivative


@triton.jit
def _difference(x, y, u, v, squash, SPEC: tl.constexpr):
    """Return u - v of two logits of the same map, and its rounding error."""
    difference, error = u - v, 0.0
    if SPEC.softcap:  # tanh a - tanh b = (1 - tanh b) (1 + tanh a) (1 - exp(2 b - 2 a)) / 2
        distance = tl.abs(x - y) * squash
        growth = _growth(-distance, tl.exp2(-distance))
        near = (tl.minimum(u, v) - 0.5) * (0.5 + tl.maximum(u, v)) * growth
        difference = tl.where(distance < 0.75, tl.where(x < y, -near, near), difference)
    else:
        back = difference - u
        error = (u - (difference - back)) - (v + back)
        error = tl.where(error == error, error, 0.0)
    return difference, error


@triton.jit
def divergence_map(
    index, row_max, log_sum, binary_gain, squash, teacher_row_max, teacher_log_sum,
    teacher_binary_gain, teacher_squash, beta, student_share,
    SPEC: tl.constexpr, TEACHER: tl.constexpr,
):  # fmt: skip
    beta = tl.maximum(beta, TINY)
    x, y = tl.load(row_max + index), tl.load(teacher_row_max + index)
    log_sum, teacher_log_sum = tl.load(log_sum + index), tl.load(teacher_log_sum + index)
    u, _ = _squash(x, squash, SPEC)
    v, _ = _squash(y, teacher_squash, TEACHER)
    difference, error = _difference(x, y, u, v, squash, SPEC)
    return DivergenceMap(
        binary_gain, squash, u, log_sum * LOG2E,
        teacher_binary_gain, teacher_squash, v, teacher_log_sum * LOG2E,
        (binary_gain == teacher_binary_gain) & (squash == teacher_squash),
        difference, error, (log_sum - teacher_log_sum) * LOG2E,
        beta, student_share, _turn(beta, student_share),
    )  # fmt: skip


@triton.jit
def _product_or_zero(probability, log):
    return tl.where(probability == 0, 0.0, probability * log)


@triton.jit
def _turn(beta, student_share):
    """Return the log2 q/p from which on the logarithms of the mixture start at q.

    With less than half of the mixture p is where it starts only if m is a third away from q, so
    neither logarithm cancels; and the reverse.
    """
    share = tl.minimum(beta, student_share)
    distance = tl.log2(1.0 + 1 / (3 * share))
    return tl.where(beta < 0.5, -distance, distance)


@triton.jit
def _mixture_logs(y, to):
    """Return ln q/m and ln p/m, with all their digits however small a share is.

    One of them is that of u = 1 + change, from there to m, and the other one is ln q/p apart.
    """
    log_ratio = y * LN2
    from_q = y >= to.turn
    t = tl.where(from_q, -y, y)
    ratio = tl.exp2(t)
    share = tl.where(from_q, to.beta, to.student_share)
    change = share * _growth(t, ratio)
    u = tl.fma(share, ratio, tl.where(from_q, to.student_share, to.beta))
    none = u == 1.0
    log_u = tl.where(none, change, tl.log(u) * (change / tl.where(none, 1.0, u - 1.0)))
    return tl.where(from_q, 0.0, log_ratio) - log_u, tl.where(from_q, -log_ratio, 0.0) - log_u


@triton.jit
def divergence_terms(
    x, x_teacher, to, KIND: tl.constexpr, SPEC: tl.constexpr, TEACHER: tl.constexpr
):
    """Return the terms of the divergence and of slope_mean, q, log2 q, agrees and dv/dx."""
    u, derivative = _squash(x, to.squash, SPEC)
    v, _ = _squash(x_teacher, to.teacher_squash, TEACHER)
    log2_q = tl.fma(u - to.max, to.binary_gain, -to.log2_sum)
    log2_p = tl.fma(v - to.teacher_max, to.teacher_binary_gain, -to.teacher_log2_sum)
    ahead, error = _difference(x, x_teacher, u, v, to.squash, SPEC)
    ahead = (ahead - to.difference) + (error - to.error)
    y = tl.where(to.same, tl.fma(ahead, to.binary_gain, -to.offset), log2_q - log2_p)
    student_leads = y >= 0
    log2_larger = tl.where(student_leads, log2_q, log2_p)
    y = tl.where(log2_larger == float("-inf"), 0.0, y)  # excluded by both: y may be inf - inf
    larger = tl.exp2(log2_larger)
    quotient = tl.exp2(-tl.abs(y))
    growth = _growth(-tl.abs(y), quotient)
    change, smaller = larger * growth, larger * quotient
    q = tl.where(student_leads, larger, smaller)
    p = tl.where(student_leads, smaller, larger)
    excess = tl.where(student_leads, -change, change)  # q - p
    log_ratio = (y * OVERFLOWS) * LN2_BELOW
    if KIND == FORWARD_KL:
        term, slope = excess - _product_or_zero(p, log_ratio), excess
    elif KIND == REVERSE_KL:
        slope = _product_or_zero(q, log_ratio)
        term = slope - excess
    else:  # with m = (1 - beta) q + beta p
        q, p = tl.exp2(log2_q), tl.exp2(log2_p)
        of_q, of_p = _mixture_logs(y, to)
        slope = to.student_share * _product_or_zero(q, of_q)
        term = tl.fma(to.beta, _product_or_zero(p, of_p), slope)
    return term, slope, q, log2_q, (u == to.max) & (v == to.teacher_max), derivative


@triton.jit
def _load(row, columns, vocabulary):
    return tl.load(row + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize=OF_ROWS, do_not_specialize_on_alignment=OF_TOKENS)
def divergence_fwd_kernel(
    row_max, log_sum, teacher_row_max, teacher_log_sum, beta,
    logits, token_ids, mask, ignore_index: tl.int64, temperatures, scale, squash, length,
    stride_b: tl.int64, stride_t: tl.int64, vocabulary, teacher_logits, teacher_temperatures,
    teacher_scale, teacher_squash, teacher_stride_b: tl.int64, teacher_stride_t: tl.int64,
    divergence, slope_mean, agrees, student_share, KIND: tl.constexpr,
    SPEC: tl.constexpr, TEACHER: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = COLUMNS * SPEC.lanes
    index = tl.program_id(0).to(tl.int64)
    total, mean, agreed = 0.0, 0.0, 0
    row = row_start(logits, index, length, stride_b, stride_t, SPEC)
    teacher = row_start(teacher_logits, index, length, teacher_stride_b, teacher_stride_t, TEACHER)
    if row_counts(index, tl.load(token_ids + index), mask, ignore_index):
        _, binary_gain = row_gain(index, temperatures, scale, True)
        _, teacher_binary_gain = row_gain(index, teacher_temperatures, teacher_scale, True)
        to = divergence_map(
            index, row_max, log_sum, binary_gain, squash, teacher_row_max, teacher_log_sum,
            teacher_binary_gain, teacher_squash, beta, student_share, SPEC, TEACHER,
        )  # fmt: skip
        values, slopes = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        ties = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x, y = _load(row, columns, vocabulary), _load(teacher, columns, vocabulary)
            term, slope, _q, _t, agree, _d = divergence_terms(x, y, to, KIND, SPEC, TEACHER)
            values, slopes = values + term, slopes + slope
            ties |= agree.to(tl.int32)
        total, mean, agreed = tl.sum(values, axis=0), tl.sum(slopes, axis=0), tl.max(ties, axis=0)
    tl.store(divergence + index, tl.where(total < 0, 0.0, total))
    tl.store(slope_mean + index, mean)
    tl.store(agrees + index, agreed != 0)


@triton.jit(do_not_specialize=OF_ROWS, do_not_specialize_on_alignment=OF_TOKENS)
def divergence_bwd_kernel(
    row_max, log_sum, entropy, grad_logprobs, grad_entropy, grad_logsumexp,
    teacher_row_max, teacher_log_sum, beta, slope_mean, grad_divergence,
    logits, token_ids, mask, ignore_index: tl.int64, temperatures, scale, squash, length,
    stride_b: tl.int64, stride_t: tl.int64, vocabulary, teacher_logits, teacher_temperatures,
    teacher_scale, teacher_squash, teacher_stride_b: tl.int64, teacher_stride_t: tl.int64,
    grad, grad_stride_b: tl.int64, grad_stride_t: tl.int64, student_share, KIND: tl.constexpr,
    SPEC: tl.constexpr, TEACHER: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = COLUMNS * SPEC.lanes
    index = tl.program_id(0).to(tl.int64)
    row = row_start(logits, index, length, stride_b, stride_t, SPEC)
    teacher = row_start(teacher_logits, index, length, teacher_stride_b, teacher_stride_t, TEACHER)
    grad_row = row_start(grad, index, length, grad_stride_b, grad_stride_t, SPEC)
    token_id = tl.load(token_ids + index)
    upstream = tl.load(grad_divergence + index)
    of_logprob = 0.0 if grad_logprobs is None else tl.load(grad_logprobs + index)
    of_entropy = 0.0 if grad_entropy is None else tl.load(grad_entropy + index)
    of_logsumexp = 0.0 if grad_logsumexp is None else tl.load(grad_logsumexp + index)
    has_gradient = (upstream != 0) | (of_logprob != 0) | (of_entropy != 0) | (of_logsumexp != 0)
    has_gradient &= row_counts(index, token_id, mask, ignore_index)
    gain, binary_gain = row_gain(index, temperatures, scale, has_gradient)
    _, teacher_binary_gain = row_gain(index, teacher_temperatures, teacher_scale, has_gradient)
    to = divergence_map(
        index, row_max, log_sum, binary_gain, squash, teacher_row_max, teacher_log_sum,
        teacher_binary_gain, teacher_squash, beta, student_share, SPEC, TEACHER,
    )  # fmt: skip
    stats = Statistics(tl.load(row_max + index), tl.load(log_sum + index), tl.load(entropy + index))
    chain = gain * squash * LN2 if SPEC.softcap else gain
    token = token_column(token_id, vocabulary)
    x_token = token_logit(row, token, has_gradient)
    slopes = Slopes(of_logprob, of_entropy, of_logsumexp)
    at_token = token_gradient(x_token, stats, slopes, gain, squash, SPEC) * chain
    of_token = tl.where((token >= 0) | (of_logprob == 0), of_logprob, float("nan"))
    constant = of_logsumexp - of_token - (of_entropy * stats.entropy if SPEC.entropy else 0.0)
    linear = -of_entropy * LN2
    mean = tl.load(slope_mean + index)
    tl.debug_barrier()  # everyone has read the token's logit before anyone overwrites it
    blocks = tl.cdiv(vocabulary, BLOCK)
    for i in range(blocks):
        columns = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        g = tl.zeros([BLOCK], tl.float32)
        if has_gradient:
            x, y = _load(row, columns, vocabulary), _load(teacher, columns, vocabulary)
            if grad.dtype.element_ty != logits.dtype.element_ty:
                tl.debug_barrier()  # the gradient may overwrite logits that other threads read
            _v, slope, q, log2_q, _a, of_x = divergence_terms(x, y, to, KIND, SPEC, TEACHER)
            # with an upstream gradient of 0 ignore the teacher's row, which may be NaN
            q = tl.where(upstream == 0, tl.exp2(log2_q), q)
            of_row = tl.fma(at_least(log2_q), linear, constant) if SPEC.entropy else constant
            g = tl.where(columns == token, 0.0, q * of_row)
            slope = tl.fma(slope - _product_or_zero(q, mean), upstream, g)
            slope = tl.where(x == float("-inf"), 0.0, slope)  # an excluded token
            g = tl.where(upstream == 0, g, slope) * (of_x * chain)
            g += tl.where(columns == token, at_token, 0.0)
        tl.store(grad_row + columns, g.to(grad.dtype.element_ty), mask=columns < vocabulary)


def _launch(
    kernel: Any, logits: Tensor, teacher_logits: Tensor, arguments: tuple[Any, ...], *grad: Tensor,
    **written: Any,
) -> None:  # fmt: skip
    rows = RowArguments._make(arguments[: len(RowArguments._fields)])
    scaling, saved = arguments[len(rows) : OF_PAIR], arguments[OF_PAIR:]
    teacher = row_arguments(teacher_logits, RowArguments(*rows[:3], *scaling))
    given = dict(zip(kernel.arg_names, saved, strict=False))
    beta, entropy = given["beta"], given.get("grad_entropy") is not None
    options = launch_options(logits, *grad, softcap=rows.logit_softcap, entropy=entropy)
    # these kernels do not use the other fields, which would only lead to further compilations
    lanes = min(options["SPEC"].lanes, MOST_LANES)
    used = {"lanes": lanes, "width": 0, "edges": False, "together": False}
    options["num_warps"] = max(1, options["num_warps"] * lanes // options["SPEC"].lanes)
    options["SPEC"] = options["SPEC"]._replace(**used)
    kernel[(rows.token_ids.numel(),)](
        *saved,
        **row_arguments(logits, rows),
        **{f"teacher_{name}": teacher[name] for name in OF_TEACHER},
        **written,
        student_share=1 - beta,
        KIND=0 if beta == 0 else 1 if beta == 1 else 2,
        TEACHER=launch_options(teacher_logits, softcap=scaling[-1])["SPEC"]._replace(**used),
        **options,
    )


def divergence_fwd(logits: Tensor, teacher_logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    divergence, slope_mean = (torch.empty_like(t, dtype=torch.float32) for t in arguments[:1] * 2)
    agrees = torch.empty_like(divergence, dtype=torch.bool)
    if agrees.numel():
        out = {"divergence": divergence, "slope_mean": slope_mean, "agrees": agrees}
        _launch(divergence_fwd_kernel, logits, teacher_logits, arguments, **out)
    return divergence, slope_mean, agrees


def _write_gradient(grad: Tensor, logits: Tensor, teacher_logits: Tensor, *others: Any) -> None:
    if grad.numel():
        out = {"grad": grad, "grad_stride_b": grad.stride(0), "grad_stride_t": grad.stride(1)}
        _launch(divergence_bwd_kernel, logits, teacher_logits, others, grad, **out)


def divergence_bwd(logits: Tensor, *arguments: Any) -> Tensor:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(grad, logits, *arguments)
    return grad


def divergence_bwd_(logits: Tensor, *arguments: Any) -> None:
    *others, narrow = arguments
    _write_gradient(narrowed(logits) if narrow else logits, logits, *others)
