"""The scalar formulas of every surrogate and KL estimator: the Triton counterpart of objectives.h.

Names, order and meaning agree with `csrc/objectives.h`; `fastrl/reference/objectives.py` is the
definition. A kernel is compiled for one surrogate and one KL estimator, passed to it as functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastrl import contract

#: exp(80) still fits a float; log-ratios saturate here with slope 0.
MAX_LOG_RATIO = tl.constexpr(80.0)

TOKEN = tl.constexpr(contract.LEVELS.index("token"))
SEQUENCE = tl.constexpr(contract.LEVELS.index("sequence"))
STRAIGHT_THROUGH = tl.constexpr(contract.KL_GRADIENTS.index("straight-through"))
BIAS_CORRECTED = tl.constexpr(contract.KL_GRADIENTS.index("bias-corrected"))

_LOG2E = tl.constexpr(1.4426950408889634)
_LOG2E_LOW = tl.constexpr(1.925963033500623e-08)  # the digits of log2(e) that float32 cannot hold
_LN2 = tl.constexpr(0.6931471805599453)


class SurrogateTerms(NamedTuple):
    """Results of a surrogate: loss f, slope df/dlog_ratio (or df/dlogprob), clip -1, 0 or +1."""

    loss: Any
    slope: Any
    clip: Any


class ObjectiveTerms(NamedTuple):
    """The same with log-ratio and ratio after saturation."""

    loss: Any
    slope: Any
    clip: Any
    log_ratio: Any
    ratio: Any


class KlTerms(NamedTuple):
    """The KL of a token and its derivatives.

    Attributes:
        value: the estimate.
        slope: d value / d logprob at this ratio.
        ratio_slope: d value / d log_ratio.
        own_slope: both together, for a token whose ratio is its own.
    """

    value: Any
    slope: Any
    ratio_slope: Any
    own_slope: Any


class GmpoTerms(NamedTuple):
    """The clipped token log-ratio that GMPO averages; the gradient flows where `unclipped`."""

    log_ratio: Any
    clip: Any
    unclipped: Any


@triton.jit
def exp(x):
    """Return e^x for finite x; `tl.exp` rounds its scaled argument, and loses digits of large x."""
    y = x * _LOG2E
    rest = tl.fma(x, _LOG2E, -y) + x * _LOG2E_LOW
    power = tl.exp2(y)
    return tl.fma(power, rest * _LN2, power)


@triton.jit
def expm1(x):
    """Return e^x - 1 for finite x, by its series where the difference would cancel."""
    tail = ((x * (1 / 40320) + 1 / 5040) * x + 1 / 720) * x + 1 / 120
    series = (((tail * x + 1 / 24) * x + 1 / 6) * x + 1 / 2) * x + 1.0
    return tl.where(tl.abs(x) < 0.5, series * x, exp(x) - 1.0)


@triton.jit
def clamp(x, low, high):
    """Clamp x to the bounds; NaN stays NaN."""
    raised = tl.where(x < low, low, x)
    return tl.where(raised > high, high, raised)


@triton.jit
def difference_of(logprob, other):
    """Return logprob - other; 0 if both are the same infinity: both policies exclude the token."""
    return tl.where(logprob == other, 0.0, logprob - other)


@triton.jit
def is_infinite(x):
    return tl.abs(x) == float("inf")


@triton.jit
def kl_difference(ref_logprob, logprob):
    """Return ref_logprob - logprob in a KL; 0 for an infinite logprob, which is a constant."""
    constant = is_infinite(logprob) & (ref_logprob == ref_logprob)
    return tl.where(constant, 0.0, ref_logprob - logprob)


@triton.jit
def token_slope(logprob, slope):
    """Return dL/dlogprob: 0 for an infinite log-probability, a constant; a NaN slope stays NaN."""
    return tl.where(is_infinite(logprob) & (slope == slope), 0.0, slope)


@triton.jit
def weighted(weight, value):
    """Return weight * value, and 0 for weight 0 even if the value is infinite."""
    return tl.where((weight == 0) & (value == value), 0.0, weight * value)


@triton.jit
def ppo_clip(ratio, log_ratio, in_range, advantage, logprob, c):
    free = tl.where(ratio > c.delta, c.delta, ratio) * advantage
    bounded = clamp(ratio, 1.0 - c.clip_low, 1.0 + c.clip_high) * advantage
    clipped = bounded < free
    capped = (ratio > c.delta) & (free <= bounded)
    loss = -tl.where(clipped, bounded, free)
    slope = tl.where(clipped | capped, 0.0, -ratio * advantage)
    rises, falls = advantage > 0, advantage < 0
    above = (clipped & rises) | (capped & (rises | falls))
    clip = tl.where(above, 1.0, tl.where(clipped & falls, -1.0, 0.0))
    ceiling = -c.dual_clip * advantage
    dual = falls & (loss > ceiling)
    loss = tl.where(dual, ceiling, loss)
    clip = tl.where(dual, 1.0, clip)
    return SurrogateTerms(loss, tl.where(dual | ~in_range, 0.0, slope), clip)


@triton.jit
def cispo(ratio, log_ratio, in_range, advantage, logprob, c):
    low, high = 1.0 - c.clip_low, 1.0 + c.clip_high
    slope = -clamp(ratio, low, high) * advantage  # the weight is detached
    clip = tl.where(ratio > high, 1.0, tl.where(ratio < low, -1.0, 0.0))
    clip = tl.where((advantage > 0) | (advantage < 0), clip, 0.0)
    return SurrogateTerms(weighted(slope, logprob), slope, clip)


@triton.jit
def sapo(ratio, log_ratio, in_range, advantage, logprob, c):
    tau = tl.where(advantage > 0, c.sapo_temperature_pos, c.sapo_temperature_neg)
    # the slope is decay times ratio: 0 only beyond the largest ratio, and at 85 it fits a float
    decay = exp(clamp(-tau * expm1(log_ratio), -200.0, 85.0))
    gate = 1.0 / (1.0 + decay)
    loss = -4.0 / tau * gate * advantage
    slope = -4.0 * gate * (decay * gate) * ratio * advantage
    return SurrogateTerms(loss, tl.where(in_range, slope, 0.0), tl.zeros_like(advantage))


@triton.jit
def gmpo_terms(difference, advantage, c):
    lowest, highest = log_ratio_bounds(c, MAX_LOG_RATIO)
    log_ratio = clamp(difference, lowest, highest)
    rises, falls = advantage >= 0, advantage < 0
    above, below = rises & (log_ratio > c.clip_high), falls & (log_ratio < -c.clip_low)
    clip = tl.where(above & (advantage > 0), 1.0, tl.where(below, -1.0, 0.0))
    inside = (difference >= lowest) & (difference <= highest)
    free = (rises & (log_ratio <= c.clip_high)) | (falls & (log_ratio >= -c.clip_low))
    unclipped = (inside & free) | (difference != difference) | (advantage != advantage)
    clipped = tl.where(above, c.clip_high, tl.where(below, -c.clip_low, log_ratio))
    return GmpoTerms(clipped, clip, unclipped)


@triton.jit
def gmpo(ratio, log_ratio, in_range, advantage, logprob, c):
    """Return the terms of a token with its own ratio; a sequence's come from `gmpo_terms`."""
    terms = gmpo_terms(log_ratio, advantage, c)
    loss = -advantage * exp(terms.log_ratio)
    return SurrogateTerms(loss, tl.where(terms.unclipped & in_range, loss, 0.0), terms.clip)


@triton.jit
def reinforce(ratio, log_ratio, in_range, advantage, logprob, c):
    return SurrogateTerms(weighted(-advantage, logprob), -advantage, tl.zeros_like(advantage))


@triton.jit
def log_ratio_bounds(c, limit):
    return -tl.minimum(c.log_ratio_low, limit), tl.minimum(c.log_ratio_high, limit)


@triton.jit
def objective_terms(SURROGATE: tl.constexpr, difference, advantage, logprob, c):
    """Return the terms of a token.

    `difference` is logprob - old_logprob of the token, or its mean over the sequence; the slope is
    with respect to the log-ratio, or to the log-probability where the surrogate uses that.
    """
    lowest, highest = log_ratio_bounds(c, MAX_LOG_RATIO)
    log_ratio = clamp(difference, lowest, highest)
    in_range = (difference >= lowest) & (difference <= highest)
    ratio = exp(log_ratio)
    terms = SURROGATE(ratio, log_ratio, in_range, advantage, logprob, c)
    # comparisons with NaN choose a flat branch: a NaN token must not look like a clipped one
    slope = tl.where(terms.loss == terms.loss, terms.slope, terms.loss)
    return ObjectiveTerms(terms.loss, slope, terms.clip, log_ratio, ratio)


@triton.jit
def k1(x):
    return -x, tl.zeros_like(x) + 1.0


@triton.jit
def k2(x):
    return 0.5 * x * x, -x


@triton.jit
def k3(x):
    growth = expm1(x)
    return growth - x, -growth


@triton.jit
def absolute(x):
    return tl.where(x < 0, -x, x), tl.where(x < 0, 1.0, tl.where(x > 0, -1.0, 0.0))


@triton.jit
def kl_terms(
    KL_ESTIMATOR: tl.constexpr, KL_GRADIENT: tl.constexpr, difference, policy_difference, c
):
    """Return the KL of a token and its derivatives.

    `difference` is ref_logprob - logprob; `policy_difference` is the log-ratio of the
    bias-corrected gradient, which alone uses it.
    """
    # a product of two exponentials fits a float if each exponent is clamped to half the range
    limit: tl.constexpr = MAX_LOG_RATIO / 2 if KL_GRADIENT == BIAS_CORRECTED else MAX_LOG_RATIO
    x = clamp(difference, -limit, limit)
    saturated = tl.abs(difference) > limit
    value, slope = KL_ESTIMATOR(x)
    bounded = tl.abs(value) > c.kl_clamp
    slope = tl.where(saturated | bounded, 0.0, slope)
    value = clamp(value, -c.kl_clamp, c.kl_clamp)
    ratio_slope = tl.zeros_like(value)
    own_slope = slope
    if KL_GRADIENT == STRAIGHT_THROUGH:
        slope = tl.where(saturated, 0.0, -x)  # the slope of k2
        own_slope = slope
    elif KL_GRADIENT == BIAS_CORRECTED:
        lowest, highest = log_ratio_bounds(c, limit)
        ratio = exp(clamp(policy_difference, lowest, highest))
        # where one factor is constant, the slope of the other may have the wrong sign, or any size
        held = bounded | (policy_difference < lowest) | (policy_difference > highest)
        value = ratio * value
        slope = tl.where(held, 0.0, ratio * slope)
        ratio_slope = tl.where(held | saturated, 0.0, value)
        own_slope = slope + ratio_slope
        if KL_ESTIMATOR is k3:  # both are of size e^x and cancel; their sum does not overflow
            far = tl.abs(difference) > MAX_LOG_RATIO
            own_slope = tl.where(held | far, 0.0, -difference * ratio)
    broken = value != value
    own_slope = tl.where(broken, value, own_slope)
    return KlTerms(value, tl.where(broken, value, slope), ratio_slope, own_slope)


SURROGATES = {
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "reinforce": reinforce,
}
KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}

#: The surrogates whose gradient flows through the ratio, not directly through logprob.
THROUGH_RATIO = ("ppo_clip", "sapo", "gmpo")


def compiled_for(objective: contract.ObjectiveArguments) -> dict[str, Any]:
    """Return the compilation constants of every kernel with an objective."""
    return {
        "SURROGATE": SURROGATES[contract.SURROGATES[objective.surrogate]],
        "KL_ESTIMATOR": KL_ESTIMATORS[contract.KL_ESTIMATORS[objective.kl_estimator]],
        "KL_GRADIENT": objective.kl_gradient,
    }
