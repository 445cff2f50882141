"""The policy loss from log-probabilities: loss, slope per token and every metric, in one launch.

A program takes a run of tokens (token level) or one sequence (the others, which read it again once
its ratio is known) and leaves one row of sums. The program that finishes last adds the rows up, in
the order of the programs, so two runs agree to the bit.
"""

import torch
import triton
import triton.language as tl

from fastrl.library import METRICS
from fastrl.triton import objectives
from fastrl.triton.objectives import (
    BIAS_CORRECTED,
    MAX_LOG_RATIO,
    Coefficients,
    clamp,
    exp,
    expm1,
    gmpo_terms,
    kl_terms,
    log_ratio_bounds,
    objective_terms,
)

BLOCK = 1024  # tokens of a program at a time
MOST_PROGRAMS = 1024  # at token level: beyond it programs take several blocks
NUM_WARPS = 8
PARTS = tl.constexpr(64)  # rows of sums that the last program adds at a time

TOKEN = tl.constexpr(0)
SEQUENCE = tl.constexpr(1)

# A row of sums holds the metrics in their order, and behind them what the loss needs.
RATIO_MAX = tl.constexpr(METRICS.index("ratio_max"))
RATIO_MIN = tl.constexpr(METRICS.index("ratio_min"))
ACTIVE = tl.constexpr(METRICS.index("active_tokens"))
WEIGHTED_KL = tl.constexpr(12)
WEIGHTED_ENTROPY = tl.constexpr(13)
BROKEN = tl.constexpr(14)
ROW = tl.constexpr(16)


@triton.jit
def _load(pointer, at, inside, active):
    return tl.where(active, tl.load(pointer + at, mask=inside, other=0.0), 0.0)


@triton.jit
def _tokens(at, end, logprobs, advantages, mask, old_logprobs):
    """What every sweep needs; tokens that are not active enter all arithmetic as 0."""
    inside = at < end
    active = inside & (tl.load(mask + at, mask=inside, other=0) != 0)
    logprob = _load(logprobs, at, inside, active)
    advantage = _load(advantages, at, inside, active)
    if old_logprobs is None:
        # on policy the ratio is 1 by definition, but NaN stays NaN
        difference = tl.where(logprob == logprob, 0.0, logprob)
    else:
        difference = logprob - _load(old_logprobs, at, inside, active)
    return inside, active, logprob, advantage, difference


@triton.jit
def _shared_terms(POLICY: tl.constexpr, GMPO: tl.constexpr, mean, difference, advantage, logprob, c):
    """The terms of a token of a sequence with this mean log-ratio."""
    if GMPO:
        ratio = exp(mean)
        _, clip, _ = gmpo_terms(difference, advantage, c)
        loss = -advantage * ratio
        return loss, loss, clip, mean, ratio
    else:
        return objective_terms(POLICY, mean, advantage, logprob, c)


@triton.jit
def policy_loss_kernel(
    logprobs,
    advantages,
    mask,
    weights,
    kl_weights,
    entropy_weights,
    old_logprobs,
    ref_logprobs,
    entropy,
    cu_seqlens,
    slopes,
    parts,
    finished,
    loss_out,
    metrics,
    tokens,
    length,
    c,
    POLICY: tl.constexpr,
    ESTIMATOR: tl.constexpr,
    GRADIENT: tl.constexpr,
    LEVEL: tl.constexpr,
    GMPO: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if cu_seqlens is None:
        begin = program * length
        end = begin + length
    else:
        begin = tl.load(cu_seqlens + program).to(tl.int64)
        end = tl.load(cu_seqlens + program + 1).to(tl.int64)
    limit = tokens if LEVEL == TOKEN else end
    block = tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.float32)

    mean = zero
    shared_slope = 0.0
    if LEVEL != TOKEN:
        total, count = zero, zero
        for start in range(begin, end, BLOCK):
            _, active, _, advantage, difference = _tokens(
                start + block, limit, logprobs, advantages, mask, old_logprobs
            )
            if GMPO:
                difference, _, _ = gmpo_terms(difference, advantage, c)
            total += difference
            count += active.to(tl.float32)
        size = tl.maximum(tl.sum(count, 0), 1.0)
        mean += tl.sum(total, 0) / size
        if LEVEL == SEQUENCE and (MOVES or GRADIENT == BIAS_CORRECTED):
            total = zero
            for start in range(begin, end, BLOCK):
                at = start + block
                inside, active, logprob, advantage, difference = _tokens(
                    at, limit, logprobs, advantages, mask, old_logprobs
                )
                weight = _load(weights, at, inside, active)
                if MOVES:
                    _, slope, _, _, _ = _shared_terms(
                        POLICY, GMPO, mean, difference, advantage, logprob, c
                    )
                    total += weight * slope
                if GRADIENT == BIAS_CORRECTED:
                    if kl_weights is not None:
                        weight = _load(kl_weights, at, inside, active)
                    ref = _load(ref_logprobs, at, inside, active)
                    _, _, slope = kl_terms(ESTIMATOR, GRADIENT, ref - logprob, mean, c)
                    total += weight * (c.kl_coef * slope)
            shared_slope = tl.sum(total, 0) / size

    lowest, highest = log_ratio_bounds(c, MAX_LOG_RATIO)
    policy_sum, kl_sum, kl_old_sum, entropy_sum, ratio_sum = zero, zero, zero, zero, zero
    low_sum, high_sum, active_sum, idle_sum, broken_sum = zero, zero, zero, zero, zero
    weighted_kl, weighted_entropy = zero, zero
    ratio_max, ratio_min = zero - float("inf"), zero + float("inf")
    for start in range(begin, end, BLOCK):
        at = start + block
        inside, active, logprob, advantage, difference = _tokens(
            at, limit, logprobs, advantages, mask, old_logprobs
        )
        weight = _load(weights, at, inside, active)
        if LEVEL == TOKEN:
            loss, slope, clip, _, ratio = objective_terms(
                POLICY, difference, advantage, logprob, c
            )
        else:
            loss, slope, clip, _, ratio = _shared_terms(
                POLICY, GMPO, mean, difference, advantage, logprob, c
            )
        policy_sum += weight * loss
        if LEVEL == SEQUENCE and MOVES:
            slope = zero + shared_slope
            if GMPO:
                _, _, free = gmpo_terms(difference, advantage, c)
                slope = tl.where(free, slope, 0.0)
        else:
            slope = weight * slope + shared_slope
        entropy_weight = weight
        if ref_logprobs is not None:
            ref = _load(ref_logprobs, at, inside, active)
            moved_by = difference if LEVEL == TOKEN else mean
            kl, kl_slope, ratio_slope = kl_terms(ESTIMATOR, GRADIENT, ref - logprob, moved_by, c)
            if kl_weights is not None:
                weight = _load(kl_weights, at, inside, active)
            if LEVEL != SEQUENCE:
                kl_slope += ratio_slope
            kl_sum += tl.where(active, kl, 0.0)
            weighted_kl += weight * kl
            slope += tl.where(c.kl_coef != 0, weight * (c.kl_coef * kl_slope), 0.0)
        slope = tl.where(active, slope, 0.0)
        tl.store(slopes + at, slope, mask=inside)
        idle = active & (slope == 0)
        if entropy is None:
            entropy_sum -= logprob
        else:
            bonus = _load(entropy, at, inside, active)
            if entropy_weights is not None:
                entropy_weight = _load(entropy_weights, at, inside, active)
            entropy_sum += bonus
            weighted_entropy += entropy_weight * bonus
            idle = idle & (entropy_weight * c.entropy_coef == 0)
        if old_logprobs is not None:
            log_ratio = clamp(difference, lowest, highest)
            kl_old_sum += expm1(log_ratio) - log_ratio
        ratio_sum += tl.where(active, ratio, 0.0)
        ratio_max = tl.maximum(ratio_max, tl.where(active, ratio, -float("inf")))
        ratio_min = tl.minimum(ratio_min, tl.where(active, ratio, float("inf")))
        broken_sum += (active & (ratio != ratio)).to(tl.float32)
        low_sum += (clip < 0).to(tl.float32)
        high_sum += (clip > 0).to(tl.float32)
        active_sum += active.to(tl.float32)
        idle_sum += idle.to(tl.float32)

    clip_low, clip_high = tl.sum(low_sum, 0), tl.sum(high_sum, 0)
    field = tl.arange(0, ROW)
    row = tl.where(field == 0, tl.sum(policy_sum, 0), 0.0)
    row = tl.where(field == 1, tl.sum(kl_sum, 0), row)
    row = tl.where(field == 2, tl.sum(kl_old_sum, 0), row)
    row = tl.where(field == 3, tl.sum(entropy_sum, 0), row)
    row = tl.where(field == 4, tl.sum(ratio_sum, 0), row)
    row = tl.where(field == RATIO_MAX, tl.max(ratio_max, 0), row)
    row = tl.where(field == RATIO_MIN, tl.min(ratio_min, 0), row)
    row = tl.where(field == 7, clip_low, row)
    row = tl.where(field == 8, clip_high, row)
    row = tl.where(field == 9, clip_low + clip_high, row)
    row = tl.where(field == ACTIVE, tl.sum(active_sum, 0), row)
    row = tl.where(field == 11, tl.sum(idle_sum, 0), row)
    row = tl.where(field == WEIGHTED_KL, tl.sum(weighted_kl, 0), row)
    row = tl.where(field == WEIGHTED_ENTROPY, tl.sum(weighted_entropy, 0), row)
    row = tl.where(field == BROKEN, tl.sum(broken_sum, 0), row)
    tl.store(parts + program * ROW + field, row)
    # every thread's part of the row stands before the count that lets another program read it
    tl.debug_barrier()
    programs = tl.num_programs(0)
    if tl.atomic_add(finished, 1) == programs - 1:
        _finish(parts, programs, finished, loss_out, metrics, c)


@triton.jit
def _finish(parts, programs, finished, loss_out, metrics, c):
    """Adds up the rows of sums, and leaves the count at 0 for the next launch."""
    field = tl.arange(0, ROW)
    sums = tl.zeros([PARTS, ROW], tl.float32)
    highest = sums - float("inf")
    lowest = sums + float("inf")
    for first in range(0, programs, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        known = part < programs
        rows = tl.load(
            parts + part * ROW + field[None, :], mask=known, other=0.0, cache_modifier=".cg"
        )
        sums += rows
        highest = tl.maximum(highest, tl.where(known, rows, -float("inf")))
        lowest = tl.minimum(lowest, tl.where(known, rows, float("inf")))
    total = tl.sum(sums, 0)

    active = tl.sum(tl.where(field == ACTIVE, total, 0.0), 0)
    broken = tl.sum(tl.where(field == BROKEN, total, 0.0), 0)
    nan = float("nan")
    extreme = tl.where(field == RATIO_MAX, tl.max(highest, 0), tl.min(lowest, 0))
    is_extreme = (field == RATIO_MAX) | (field == RATIO_MIN)
    as_it_is = (field == 0) | (field == ACTIVE)
    result = tl.where(as_it_is, total, total / tl.maximum(active, 1.0))
    result = tl.where(is_extreme, tl.where(broken > 0, nan, extreme), result)
    result = tl.where(active > 0, result, 0.0)
    tl.store(metrics + field, result, mask=field < WEIGHTED_KL)
    factor = tl.where(field == 0, 1.0, 0.0)
    factor = tl.where(field == WEIGHTED_KL, c.kl_coef, factor)
    factor = tl.where(field == WEIGHTED_ENTROPY, -c.entropy_coef, factor)
    tl.store(loss_out, tl.sum(tl.where(factor != 0, factor * total, 0.0), 0))
    tl.store(finished, 0)


_counts: dict[tuple[int, int], torch.Tensor] = {}


def _count_of_finished(device):
    """A zero that the kernel leaves at zero: one for each stream, one for each captured graph."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counts:
        _counts[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counts[key]


def policy_loss_fwd(
    logprobs,
    advantages,
    mask,
    weights,
    kl_weights,
    entropy_weights,
    old_logprobs,
    ref_logprobs,
    entropy,
    cu_seqlens,
    level,
    ratio,
    kl_estimator,
    kl_gradient,
    coefficients,
):
    slope = torch.empty_like(logprobs)
    c = Coefficients(*coefficients)
    policy = objectives.POLICIES[ratio]
    gmpo = policy is objectives.gmpo
    level = 1 if gmpo else level
    tokens, length = logprobs.numel(), logprobs.shape[1]
    if level == 0:
        blocks = triton.cdiv(tokens, BLOCK)
        length = triton.cdiv(blocks, MOST_PROGRAMS) * BLOCK
        programs, cu_seqlens = triton.cdiv(tokens, length) if tokens else 0, None
    else:
        programs = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    loss, metrics = logprobs.new_empty(()), logprobs.new_empty(len(METRICS))
    if programs == 0:
        return loss.zero_(), slope, metrics.zero_()
    policy_loss_kernel[(programs,)](
        logprobs,
        advantages,
        mask,
        weights,
        kl_weights,
        entropy_weights,
        old_logprobs,
        ref_logprobs,
        entropy,
        cu_seqlens,
        slope,
        logprobs.new_empty(programs, ROW.value),
        _count_of_finished(logprobs.device),
        loss,
        metrics,
        tokens,
        length,
        c,
        POLICY=policy,
        ESTIMATOR=objectives.KL[kl_estimator],
        GRADIENT=kl_gradient,
        LEVEL=level,
        GMPO=gmpo,
        MOVES=policy not in (objectives.cispo, objectives.reinforce),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return loss, slope, metrics
