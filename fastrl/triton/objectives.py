"""The scalar mathematics of every objective and KL estimator: the Triton twin of objectives.h.

Names, order and meaning are those of `csrc/objectives.h`; `fastrl/reference/objectives.py` is the
definition. A kernel gets the function it is compiled for as a constexpr, and knows none by name.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

#: exp(80) still fits a float; log-ratios saturate here with slope 0.
MAX_LOG_RATIO = tl.constexpr(80.0)
EXACT, STRAIGHT_THROUGH, BIAS_CORRECTED = (tl.constexpr(way) for way in range(3))

_LOG2E = tl.constexpr(1.4426950408889634)
_LOG2E_LOW = tl.constexpr(1.925963033500623e-08)  # what float32 leaves of log2(e)
_LN2 = tl.constexpr(0.6931471805599453)


class Coefficients(NamedTuple):
    """The operators' `coefficients`, in their order; bounds that are not set are infinite."""

    clip_low: float
    clip_high: float
    dual_clip: float
    delta: float
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    kl_coef: float
    kl_clamp: float
    log_ratio_low: float
    log_ratio_high: float
    entropy_coef: float


@triton.jit
def exp(x):
    """e^x for finite x; `tl.exp` rounds its scaled argument, and so loses digits of large ones."""
    y = x * _LOG2E
    rest = tl.fma(x, _LOG2E, -y) + x * _LOG2E_LOW
    power = tl.exp2(y)
    return tl.fma(power, rest * _LN2, power)


@triton.jit
def expm1(x):
    """e^x - 1 for finite x, by its series where the difference would cancel."""
    tail = ((x * (1 / 40320) + 1 / 5040) * x + 1 / 720) * x + 1 / 120
    series = (((tail * x + 1 / 24) * x + 1 / 6) * x + 1 / 2) * x + 1.0
    return tl.where(tl.abs(x) < 0.5, series * x, exp(x) - 1.0)


@triton.jit
def clamp(x, low, high):
    """Hold x within the bounds, and let NaN through."""
    raised = tl.where(x < low, low, x)
    return tl.where(raised > high, high, raised)


@triton.jit
def difference_of(logprob, other):
    """Of two log-probabilities; 0 where both are the same infinity: excluded from both."""
    return tl.where(logprob == other, 0.0, logprob - other)


@triton.jit
def token_slope(logprob, slope):
    """dL/dlogprob: an infinite log-probability is a constant, but NaN reaches the gradient."""
    return tl.where((tl.abs(logprob) == float("inf")) & (slope == slope), 0.0, slope)


@triton.jit
def weighted(weight, value):
    """Multiply; 0 where the weight is, also next to an infinite value."""
    return tl.where((weight == 0) & (value == value), 0.0, weight * value)


@triton.jit
def ppo_clip(ratio, log_ratio, moves, advantage, logprob, c):
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
    return loss, tl.where(dual | ~moves, 0.0, slope), clip


@triton.jit
def cispo(ratio, log_ratio, moves, advantage, logprob, c):
    low, high = 1.0 - c.clip_low, 1.0 + c.clip_high
    slope = -clamp(ratio, low, high) * advantage  # the weight is detached
    clip = tl.where(ratio > high, 1.0, tl.where(ratio < low, -1.0, 0.0))
    clip = tl.where((advantage > 0) | (advantage < 0), clip, 0.0)
    return weighted(slope, logprob), slope, clip


@triton.jit
def sapo(ratio, log_ratio, moves, advantage, logprob, c):
    tau = tl.where(advantage > 0, c.sapo_temperature_pos, c.sapo_temperature_neg)
    # the slope is decay times ratio: 0 only beyond the largest ratio, and at 85 it fits a float
    decay = exp(clamp(-tau * expm1(log_ratio), -200.0, 85.0))
    gate = 1.0 / (1.0 + decay)
    slope = -4.0 * gate * (decay * gate) * ratio * advantage
    return -4.0 / tau * gate * advantage, tl.where(moves, slope, 0.0), tl.zeros_like(advantage)


@triton.jit
def gmpo_terms(difference, advantage, c):
    """The clipped token log-ratio that GMPO averages, its clip flag, and whether it moves."""
    lowest, highest = log_ratio_bounds(c, MAX_LOG_RATIO)
    log_ratio = clamp(difference, lowest, highest)
    rises, falls = advantage >= 0, advantage < 0
    above, below = rises & (log_ratio > c.clip_high), falls & (log_ratio < -c.clip_low)
    clip = tl.where(above & (advantage > 0), 1.0, tl.where(below, -1.0, 0.0))
    inside = (difference >= lowest) & (difference <= highest)
    free = (rises & (log_ratio <= c.clip_high)) | (falls & (log_ratio >= -c.clip_low))
    moves = (inside & free) | (difference != difference) | (advantage != advantage)
    return tl.where(above, c.clip_high, tl.where(below, -c.clip_low, log_ratio)), clip, moves


@triton.jit
def gmpo(ratio, log_ratio, moves, advantage, logprob, c):
    """One token's own geometric mean; over a sequence the caller averages `gmpo_terms`."""
    clipped, clip, free = gmpo_terms(log_ratio, advantage, c)
    loss = -advantage * exp(clipped)
    return loss, tl.where(free & moves, loss, 0.0), clip


@triton.jit
def reinforce(ratio, log_ratio, moves, advantage, logprob, c):
    return weighted(-advantage, logprob), -advantage, tl.zeros_like(advantage)


@triton.jit
def log_ratio_bounds(c, limit):
    return -tl.minimum(c.log_ratio_low, limit), tl.minimum(c.log_ratio_high, limit)


@triton.jit
def objective_terms(POLICY: tl.constexpr, difference, advantage, logprob, c):
    """Return loss, slope, clip flag, and log_ratio and ratio after saturation.

    `difference` is logprob - old_logprob of the token, or its mean over the sequence; the slope is
    that of the log-ratio, or of the log-probability where the objective uses it.
    """
    lowest, highest = log_ratio_bounds(c, MAX_LOG_RATIO)
    log_ratio = clamp(difference, lowest, highest)
    moves = (difference >= lowest) & (difference <= highest)
    ratio = exp(log_ratio)
    loss, slope, clip = POLICY(ratio, log_ratio, moves, advantage, logprob, c)
    # comparisons with NaN choose a flat branch: a broken token must not pass for a clipped one
    return loss, tl.where(loss == loss, slope, loss), clip, log_ratio, ratio


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
    ESTIMATOR: tl.constexpr, GRADIENT: tl.constexpr, difference, policy_difference, c
):  # fmt: skip
    """Return value, slope by logprob at this ratio, slope by the ratio's logarithm, and own slope.

    The last is by both together, where the ratio is the token's own. `difference` is
    ref_logprob - logprob; `policy_difference` that of `objective_terms`, which only the
    bias-corrected gradient looks at.
    """
    # a product of two exponentials fits a float where each factor is held at half the range
    limit: tl.constexpr = MAX_LOG_RATIO / 2 if GRADIENT == BIAS_CORRECTED else MAX_LOG_RATIO
    x = clamp(difference, -limit, limit)
    in_range = (difference >= -limit) & (difference <= limit)
    value, slope = ESTIMATOR(x)
    inside = in_range & (value >= -c.kl_clamp) & (value <= c.kl_clamp)
    slope = tl.where(inside, slope, 0.0)
    value = clamp(value, -c.kl_clamp, c.kl_clamp)
    ratio_slope = tl.zeros_like(value)
    own_slope = slope
    if GRADIENT == STRAIGHT_THROUGH:
        slope = tl.where(in_range, -x, 0.0)  # that of k2
        own_slope = slope
    elif GRADIENT == BIAS_CORRECTED:
        lowest, highest = log_ratio_bounds(c, limit)
        ratio = exp(clamp(policy_difference, lowest, highest))
        moves = (policy_difference >= lowest) & (policy_difference <= highest)
        value = ratio * value
        slope = ratio * slope
        ratio_slope = tl.where(moves, value, 0.0)
        own_slope = slope + ratio_slope
        if ESTIMATOR is k3:  # the two are e^x apart from what is left of them
            own_slope = tl.where(inside & moves, -x * ratio, own_slope)
    broken = value != value
    own_slope = tl.where(broken, value, own_slope)
    return value, tl.where(broken, value, slope), ratio_slope, own_slope


#: In the order of `fastrl.objective.RATIOS` and `KL_ESTIMATORS`.
POLICIES = (ppo_clip, cispo, sapo, gmpo, reinforce)
KL = (k1, k2, k3, absolute)
