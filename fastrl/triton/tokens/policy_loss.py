"""The policy loss from log-probabilities: loss, slope per token and every metric.

A program takes a run of tokens (at token level) or one sequence (at the other levels, which read
the sequence again once its ratio is known) and stores one row of sums. The program that finishes
last, found by a counter that each call zeroes, adds up the rows in the order of the programs, so
two runs agree to the bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastrl import contract
from fastrl.contract import Coefficients, LossArguments, Metrics, ObjectiveArguments
from fastrl.triton.loss_constants import by_sequence, load_constant, load_weights
from fastrl.triton.objectives import (
    MAX_LOG_RATIO,
    SEQUENCE,
    THROUGH_RATIO,
    TOKEN,
    ObjectiveTerms,
    clamp,
    compiled_for,
    difference_of,
    exp,
    expm1,
    gmpo,
    gmpo_terms,
    kl_difference,
    kl_terms,
    log_ratio_bounds,
    objective_terms,
    token_slope,
    weighted,
)
from fastrl.triton.sequences import packed_sequence, padded_sequence
from fastrl.triton.tokens.last_program import count_of_finished, is_last
from fastrl.triton.tokens.loss_sums import (
    ROW,
    finish,
    fold,
    fold_max,
    fold_min,
    product,
    store_sums,
)

BLOCK = 1024  # tokens of a program at a time
MOST_PROGRAMS = 512  # at token level: with more blocks, a program takes several
NUM_WARPS = 8


class Outputs(NamedTuple):
    """The results of the operator; without an entropy coefficient there is no entropy slope."""

    loss: Any
    slope: Any
    entropy_slope: Any
    metrics: Any


class Tokens(NamedTuple):
    """A block of tokens; inactive ones enter all arithmetic as 0."""

    at: Any
    sequence: Any
    inside: Any
    active: Any
    logprob: Any
    advantage: Any
    difference: Any


@triton.jit
def _load(pointer, at, inside, active):
    return tl.where(active, tl.load(pointer + at, mask=inside, other=0.0), 0.0)


@triton.jit
def _load_tokens(
    start, end, logprobs, mask, loss, length, sequence, BY_SEQUENCE: tl.constexpr,
    LEVEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load a block; `sequence` is its sequence, or at token level the number of sequences."""
    block = tl.arange(0, BLOCK)
    at = start + block
    inside = at < end
    active = inside & (tl.load(mask + at, mask=inside, other=0) != 0)
    if LEVEL == TOKEN:
        if loss.cu_seqlens is None:
            sequence = padded_sequence(start, block, length)
        else:
            sequence = packed_sequence(at, loss.cu_seqlens, sequence)
    logprob = _load(logprobs, at, inside, active)
    advantage = load_constant(loss.advantages, BY_SEQUENCE.advantages, sequence, at, inside, active)
    old = logprob  # on policy the ratio is 1 by definition, but NaN stays NaN
    if loss.old_logprobs is not None:
        old = _load(loss.old_logprobs, at, inside, active)
    difference = difference_of(logprob, old)
    return Tokens(at, sequence, inside, active, logprob, advantage, difference)


@triton.jit
def _weights(tokens, loss, BY_SEQUENCE: tl.constexpr):
    return load_weights(loss, BY_SEQUENCE, tokens.sequence, tokens.at, tokens.inside, tokens.active)


@triton.jit
def _ref_difference(tokens, loss):
    ref = _load(loss.ref_logprobs, tokens.at, tokens.inside, tokens.active)
    return kl_difference(ref, tokens.logprob)


@triton.jit
def _terms(SURROGATE: tl.constexpr, LEVEL: tl.constexpr, mean, tokens, c):
    """Return the terms of tokens; tokens of one sequence share its mean log-ratio."""
    if SURROGATE is gmpo:
        ratio = exp(mean)
        loss = -tokens.advantage * ratio
        clip = gmpo_terms(tokens.difference, tokens.advantage, c).clip
        return ObjectiveTerms(loss, loss, clip, mean, ratio)
    else:
        difference = tokens.difference if LEVEL == TOKEN else mean
        return objective_terms(SURROGATE, difference, tokens.advantage, tokens.logprob, c)


@triton.jit(do_not_specialize=("length", "sequences", "tokens", "span"))
def policy_loss_kernel(
    logprobs, entropy, mask, loss, length, sequences, c, out, partial_sums, finished, tokens, span,
    SURROGATE: tl.constexpr, KL_ESTIMATOR: tl.constexpr, KL_GRADIENT: tl.constexpr,
    LEVEL: tl.constexpr, KL_BY_TOKEN: tl.constexpr, THROUGH_RATIO: tl.constexpr,
    BY_SEQUENCE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if LEVEL == TOKEN or loss.cu_seqlens is None:
        begin = program * span
        end = begin + span
    else:
        begin = tl.load(loss.cu_seqlens + program).to(tl.int64)
        end = tl.load(loss.cu_seqlens + program + 1).to(tl.int64)
    limit = tokens if LEVEL == TOKEN else end
    if ALIGNED:  # a hint has no effect on an argument, hence the division
        begin = tl.multiple_of(begin, 4)
        limit = limit // 4 * 4
    sequence = sequences if LEVEL == TOKEN else program
    zero = tl.zeros([BLOCK], tl.float32)

    mean, shared_slope = zero, 0.0
    if LEVEL != TOKEN:
        total, count = zero, zero
        for start in range(begin, end, BLOCK):
            x = _load_tokens(
                start, limit, logprobs, mask, loss, length, sequence, BY_SEQUENCE, LEVEL, BLOCK
            )
            log_ratio = x.difference
            if SURROGATE is gmpo:
                log_ratio = gmpo_terms(x.difference, x.advantage, c).log_ratio
            total += log_ratio
            count += x.active.to(tl.float32)
        size = tl.maximum(tl.sum(count, 0), 1.0)
        mean = zero + tl.div_rn(tl.sum(total, 0), size)
        alone = size == 1  # a single token has its own ratio, and the KL's slope through it
        if LEVEL == SEQUENCE and (THROUGH_RATIO or not KL_BY_TOKEN):
            total = zero
            for start in range(begin, end, BLOCK):
                x = _load_tokens(
                    start, limit, logprobs, mask, loss, length, sequence, BY_SEQUENCE, LEVEL, BLOCK
                )
                weights = _weights(x, loss, BY_SEQUENCE)
                if THROUGH_RATIO:
                    total += weighted(weights.policy, _terms(SURROGATE, LEVEL, mean, x, c).slope)
                if not KL_BY_TOKEN:
                    kl = kl_terms(KL_ESTIMATOR, KL_GRADIENT, _ref_difference(x, loss), mean, c)
                    slope = weights.kl * (c.kl_coef * kl.ratio_slope)
                    total += tl.where(alone | (c.kl_coef == 0), 0.0, slope)
            shared_slope = tl.div_rn(tl.sum(total, 0), size)

    lowest, highest = log_ratio_bounds(c, MAX_LOG_RATIO)
    none = tl.zeros([BLOCK // 4], tl.float32)
    policy_sum, kl_sum, kl_old_sum, entropy_sum, ratio_sum = none, none, none, none, none
    low_sum, high_sum, active_sum, zero_grad_sum = none, none, none, none
    weighted_kl, weighted_entropy = none, none
    ratio_max, ratio_min = none - float("inf"), none + float("inf")
    for start in range(begin, end, BLOCK):
        x = _load_tokens(
            start, limit, logprobs, mask, loss, length, sequence, BY_SEQUENCE, LEVEL, BLOCK
        )
        weights = _weights(x, loss, BY_SEQUENCE)
        terms = _terms(SURROGATE, LEVEL, mean, x, c)
        policy_sum += fold(weighted(weights.policy, terms.loss))
        ratio_sum += fold(tl.where(x.active, terms.ratio, 0.0))
        highest_ratio = fold_max(tl.where(x.active, terms.ratio, -float("inf")))
        lowest_ratio = fold_min(tl.where(x.active, terms.ratio, float("inf")))
        ratio_max = tl.maximum(ratio_max, highest_ratio)
        ratio_min = tl.minimum(ratio_min, lowest_ratio)
        low_sum += fold((terms.clip < 0).to(tl.float32))
        high_sum += fold((terms.clip > 0).to(tl.float32))
        if LEVEL == SEQUENCE and THROUGH_RATIO:
            slope = zero + shared_slope
            if SURROGATE is gmpo:
                unclipped = gmpo_terms(x.difference, x.advantage, c).unclipped
                slope = tl.where(unclipped, slope, 0.0)
        else:
            slope = weighted(weights.policy, terms.slope) + shared_slope
        if loss.ref_logprobs is not None:
            policy_difference = x.difference if KL_BY_TOKEN else mean
            kl = kl_terms(KL_ESTIMATOR, KL_GRADIENT, _ref_difference(x, loss), policy_difference, c)
            kl_slope = kl.own_slope
            if LEVEL == SEQUENCE and not KL_BY_TOKEN:
                kl_slope = tl.where(alone, kl.own_slope, kl.slope)
            kl_sum += fold(tl.where(x.active, kl.value, 0.0))
            weighted_kl += fold(product(weights.kl, kl.value))
            slope += tl.where(c.kl_coef != 0, weights.kl * (c.kl_coef * kl_slope), 0.0)
        slope = tl.where(x.active, token_slope(x.logprob, slope), 0.0)
        tl.store(out.slope + x.at, slope, mask=x.inside)
        zero_grad = x.active & (slope == 0)
        if out.entropy_slope is not None:
            entropy_slope = -c.entropy_coef * weights.entropy
            zero_grad = zero_grad & (entropy_slope == 0)
            if entropy is None:
                entropy_slope = zero
            tl.store(out.entropy_slope + x.at, entropy_slope, mask=x.inside)
        if entropy is None:
            entropy_sum -= fold(x.logprob)
        else:
            bonus = _load(entropy, x.at, x.inside, x.active)
            entropy_sum += fold(bonus)
            weighted_entropy += fold(product(weights.entropy, bonus))
        if loss.old_logprobs is not None:
            log_ratio = clamp(x.difference, lowest, highest)
            kl_old_sum += fold(expm1(log_ratio) - log_ratio)
        else:
            kl_old_sum += fold(x.difference)  # 0 or NaN
        active_sum += fold(x.active.to(tl.float32))
        zero_grad_sum += fold(zero_grad.to(tl.float32))

    sums = Metrics(
        policy_loss=policy_sum,
        kl=kl_sum,
        kl_old=kl_old_sum,
        entropy=entropy_sum,
        ratio_mean=ratio_sum,
        ratio_max=none,
        ratio_min=none,
        clip_low=low_sum,
        clip_high=high_sum,
        clip_fraction=low_sum + high_sum,
        active_tokens=active_sum,
        zero_grad_fraction=zero_grad_sum,
    )
    store_sums(partial_sums, program, sums, ratio_max, ratio_min, weighted_kl, weighted_entropy)
    if is_last(finished):
        finish(partial_sums, tl.num_programs(0), out.loss, out.metrics, c)


def _at_16_bytes(tensor):
    """Return the tensor, or a copy if it does not begin at a multiple of 16 bytes."""
    is_there = tensor is None or tensor.data_ptr() % 16 == 0
    return tensor if is_there else tensor.clone()


def policy_loss_fwd(logprobs, entropy, mask, *arguments):
    loss = LossArguments._make(arguments[: len(LossArguments._fields)])
    objective = ObjectiveArguments._make(arguments[len(LossArguments._fields) :])
    c = Coefficients._make(objective.coefficients)
    surrogate = contract.SURROGATES[objective.surrogate]
    level = contract.LEVELS[objective.level]
    if surrogate == "gmpo":  # a geometric mean over a sequence
        level = "sequence"
    which = by_sequence(loss)
    tokens, span = logprobs.numel(), logprobs.shape[1]
    sequences = logprobs.shape[0] if loss.cu_seqlens is None else loss.cu_seqlens.shape[0] - 1
    if level == "token":
        span = triton.cdiv(triton.cdiv(tokens, BLOCK), MOST_PROGRAMS) * BLOCK
        programs = triton.cdiv(tokens, span) if tokens else 0
        if not any(which):
            loss = loss._replace(cu_seqlens=None)
    else:
        programs = sequences
    has_entropy_slope = c.entropy_coef != 0
    # groups of four tokens are in range as a whole, and begin at multiples of 16 bytes
    by_four = tokens if level == "token" else span
    aligned = by_four % 4 == 0 and (level == "token" or loss.cu_seqlens is None)
    logprobs, entropy, mask = map(_at_16_bytes, (logprobs, entropy, mask))
    loss = LossArguments._make(map(_at_16_bytes, loss))
    out = Outputs(
        loss=logprobs.new_empty(()),
        slope=torch.empty_like(logprobs),
        entropy_slope=logprobs.new_empty(logprobs.shape if has_entropy_slope else (0,)),
        metrics=logprobs.new_empty(len(Metrics._fields)),
    )
    if programs == 0:
        out.loss.zero_()
        out.metrics.zero_()
        return tuple(out)
    policy_loss_kernel[(programs,)](
        logprobs,
        entropy,
        mask,
        loss,
        logprobs.shape[1],
        sequences,
        c,
        out if has_entropy_slope else out._replace(entropy_slope=None),
        logprobs.new_empty(programs, ROW.value),
        count_of_finished(logprobs.device),
        tokens,
        span,
        **compiled_for(objective),
        LEVEL=contract.LEVELS.index(level),
        KL_BY_TOKEN=loss.ref_logprobs is None or objective.kl_by_token(),
        THROUGH_RATIO=surrogate in THROUGH_RATIO,
        BY_SEQUENCE=which,
        BLOCK=BLOCK,
        ALIGNED=aligned,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return tuple(out)
