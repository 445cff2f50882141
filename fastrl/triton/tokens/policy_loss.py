"""The policy loss from log-probabilities: loss, slope per token and every metric, in one launch.

A program takes a run of tokens (token level) or one sequence (the others, which read it again once
its ratio is known) and leaves one row of sums. The program that finishes last adds the rows up, in
the order of the programs, so two runs agree to the bit.
"""

import torch
import triton
import triton.language as tl

from fastrl.contract import METRICS
from fastrl.triton import objectives
from fastrl.triton.objectives import (
    BIAS_CORRECTED,
    MAX_LOG_RATIO,
    Coefficients,
    clamp,
    difference_of,
    exp,
    expm1,
    gmpo_terms,
    kl_terms,
    log_ratio_bounds,
    objective_terms,
    token_slope,
    weighted,
)
from fastrl.triton.runtime.target import Target
from fastrl.triton.tokens.loss_sums import (
    RATIO_MAX,
    RATIO_MIN,
    ROW,
    columns,
    count_of_finished,
    finish,
    fold,
)

BLOCK = 1024  # tokens of a program at a time
MOST_PROGRAMS = 512  # at token level: beyond it programs take several blocks
NUM_WARPS = 8

TOKEN = tl.constexpr(0)
SEQUENCE = tl.constexpr(1)


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
    old = logprob  # on policy the ratio is 1 by definition, but NaN stays NaN
    if old_logprobs is not None:
        old = _load(old_logprobs, at, inside, active)
    difference = difference_of(logprob, old)
    return inside, active, logprob, advantage, difference


@triton.jit
def _shared_terms(
    POLICY: tl.constexpr, GMPO: tl.constexpr, mean, difference, advantage, logprob, c
):
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
        alone = size == 1  # its ratio is its own, and the slope of the KL through it
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
                    total += weighted(weight, slope)
                if GRADIENT == BIAS_CORRECTED:
                    if kl_weights is not None:
                        weight = _load(kl_weights, at, inside, active)
                    ref = _load(ref_logprobs, at, inside, active)
                    from_ref = difference_of(ref, logprob)
                    _, _, slope, _ = kl_terms(ESTIMATOR, GRADIENT, from_ref, mean, c)
                    total += tl.where(alone, 0.0, weight * (c.kl_coef * slope))
            shared_slope = tl.sum(total, 0) / size

    lowest, highest = log_ratio_bounds(c, MAX_LOG_RATIO)
    none = tl.zeros([BLOCK // 4], tl.float32)
    policy_sum, kl_sum, kl_old_sum, entropy_sum, ratio_sum = none, none, none, none, none
    low_sum, high_sum, active_sum, idle_sum = none, none, none, none
    weighted_kl, weighted_entropy = none, none
    ratio_max, ratio_min = zero - float("inf"), zero + float("inf")
    for start in range(begin, end, BLOCK):
        at = start + block
        inside, active, logprob, advantage, difference = _tokens(
            at, limit, logprobs, advantages, mask, old_logprobs
        )
        weight = _load(weights, at, inside, active)
        if LEVEL == TOKEN:
            loss, slope, clip, _, ratio = objective_terms(POLICY, difference, advantage, logprob, c)
        else:
            loss, slope, clip, _, ratio = _shared_terms(
                POLICY, GMPO, mean, difference, advantage, logprob, c
            )
        policy_sum += fold(weighted(weight, loss))
        if LEVEL == SEQUENCE and MOVES:
            slope = zero + shared_slope
            if GMPO:
                _, _, free = gmpo_terms(difference, advantage, c)
                slope = tl.where(free, slope, 0.0)
        else:
            slope = weighted(weight, slope) + shared_slope
        entropy_weight = weight
        if ref_logprobs is not None:
            ref = _load(ref_logprobs, at, inside, active)
            moved_by = difference if LEVEL == TOKEN else mean
            kl, kl_slope, _, own_slope = kl_terms(
                ESTIMATOR, GRADIENT, difference_of(ref, logprob), moved_by, c
            )
            if kl_weights is not None:
                weight = _load(kl_weights, at, inside, active)
            if LEVEL != SEQUENCE:
                kl_slope = own_slope
            elif GRADIENT == BIAS_CORRECTED:
                kl_slope = tl.where(alone, own_slope, kl_slope)
            kl_sum += fold(tl.where(active, kl, 0.0))
            weighted_kl += fold(weight * kl)
            slope += tl.where(c.kl_coef != 0, weight * (c.kl_coef * kl_slope), 0.0)
        slope = tl.where(active, token_slope(logprob, slope), 0.0)
        tl.store(slopes + at, slope, mask=inside)
        idle = active & (slope == 0)
        if entropy is None:
            entropy_sum -= fold(logprob)
        else:
            bonus = _load(entropy, at, inside, active)
            if entropy_weights is not None:
                entropy_weight = _load(entropy_weights, at, inside, active)
            entropy_sum += fold(bonus)
            weighted_entropy += fold(entropy_weight * bonus)
            idle = idle & (entropy_weight * c.entropy_coef == 0)
        if old_logprobs is not None:
            log_ratio = clamp(difference, lowest, highest)
            kl_old_sum += fold(expm1(log_ratio) - log_ratio)
        else:
            kl_old_sum += fold(difference)  # 0 or NaN
        ratio_sum += fold(tl.where(active, ratio, 0.0))
        ratio_max = tl.maximum(ratio_max, tl.where(active, ratio, -float("inf")))
        ratio_min = tl.minimum(ratio_min, tl.where(active, ratio, float("inf")))
        low_sum += fold((clip < 0).to(tl.float32))
        high_sum += fold((clip > 0).to(tl.float32))
        active_sum += fold(active.to(tl.float32))
        idle_sum += fold(idle.to(tl.float32))

    # in the order of the metrics; what stands behind them is for the loss
    fields = columns(
        columns(policy_sum, ratio_sum, high_sum, weighted_kl),
        columns(kl_sum, none, low_sum + high_sum, weighted_entropy),
        columns(kl_old_sum, none, active_sum, none),
        columns(entropy_sum, low_sum, idle_sum, none),
    )
    field = tl.arange(0, ROW)
    row = tl.sum(tl.reshape(fields, [BLOCK // 4, ROW]), 0)
    row = tl.where(field == RATIO_MAX, tl.max(ratio_max, 0), row)
    row = tl.where(field == RATIO_MIN, tl.min(ratio_min, 0), row)
    tl.store(parts + program * ROW + field, row)
    # every thread's part of the row stands before the count that lets another program read it
    tl.debug_barrier()
    programs = tl.num_programs(0)
    if tl.atomic_add(finished, 1) == programs - 1:
        finish(parts, programs, finished, loss_out, metrics, c)


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
        count_of_finished(logprobs.device),
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
        enable_fp_fusion=True,
    )
    return loss, slope, metrics


def targets():
    floats = ("logprobs", "advantages", "weights", "old_logprobs", "slopes")
    outputs = ("parts", "loss_out", "metrics")
    plain = {
        **dict.fromkeys((*floats, *outputs), "*fp32"),
        **dict.fromkeys(("tokens", "length"), "i32"),
        "mask": "*i1",
        "finished": "*i32",
        "c": Coefficients._make(["fp32"] * len(Coefficients._fields)),
    }
    optional = ("kl_weights", "entropy_weights", "ref_logprobs", "entropy")
    full = {**plain, **dict.fromkeys(optional, "*fp32")}
    packed = {**full, "cu_seqlens": "*i32"}
    # name, types, policy, KL gradient, level, bytes per token, instructions, loops that stream
    variants = [
        ("policy_loss", plain, objectives.ppo_clip, 0, 0, 21, 120, 1),
        ("policy_loss_full", full, objectives.sapo, 2, 0, 37, 215, 1),
        ("policy_loss_sequence", plain, objectives.ppo_clip, 0, 1, 21, 220, 3),
        ("policy_loss_packed", packed, objectives.gmpo, 0, 1, 37, 320, 3),
    ]
    return [
        Target(
            name=name,
            kernel=policy_loss_kernel,
            types=types,
            constants={
                "POLICY": policy,
                "ESTIMATOR": objectives.k3,
                "GRADIENT": gradient,
                "LEVEL": level,
                "GMPO": policy is objectives.gmpo,
                "MOVES": True,
                "BLOCK": BLOCK,
            },
            divisible=(*(n for n, t in types.items() if t[0] == "*"), "tokens", "length"),
            num_warps=NUM_WARPS,
            element_bytes=4,
            bytes_per_element=moved,
            instructions=instructions,
            block=BLOCK,
            loops=loops,
            # flags are a byte each; packed sequences begin anywhere
            narrow=1 if "cu_seqlens" not in types else 40,
            options={"enable_fp_fusion": True},
            spills={"3.6": 3} if name == "policy_loss_sequence" else None,
        )
        for name, types, policy, gradient, level, moved, instructions, loops in variants
    ]
