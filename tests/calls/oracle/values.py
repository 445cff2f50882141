"""`value_loss`, `kl_divergence`, `whiten` and `masked_mean`."""

import numpy as np

from .bounded import Bounded, Decision, beyond, certain, choose, constant, unbounded, where
from .functions import held, mean
from .terms import difference, kl_value, zeros

SATURATION = 80.0


def value_error(v: Bounded, r: Bounded, kind: str) -> tuple[Bounded, Bounded]:
    """Return e(V, R) and its derivative by V."""
    d = v - r
    if kind == "mse":
        return d * d / 2.0, d
    far = beyond(abs(d), 1.0)
    sign = constant(np.sign(d.value), d.arithmetic)
    value = choose(far, abs(d) - 0.5, d * d / 2.0)
    return value, choose(far, sign, d)


def value_terms(
    v: Bounded, r: Bounded, old: Bounded | None, clip: float | None, kind: str
) -> tuple[Bounded, Bounded, object]:
    """Return the loss of each token, its derivative, and where the clipped one is the larger."""
    free, slope = value_error(v, r, kind)
    if old is None:
        return free, slope, certain(np.zeros(v.shape, bool))
    moved, outside = held(v - old, -clip, clip)
    clipped, clipped_slope = value_error(old + moved, r, kind)
    same = ~outside.yes & ~outside.doubtful & (old.value + (v - old).value == v.value)
    larger = beyond(clipped, free) & ~same
    lost = np.isnan(free.value) | np.isnan(clipped.value)
    nothing = np.where(lost, np.nan, 0.0)
    inner = choose(outside, zeros(v), clipped_slope)
    value = where(lost, free + nothing, choose(larger, clipped, free))
    slope = where(lost, free + nothing, choose(larger, inner, slope))
    # unspecified: a clipped error whose formula has a difference of two infinities
    given = np.isnan(v.value) | np.isnan(r.value) | np.isnan(old.value)
    unspecified = np.isnan(clipped.value) & ~np.isnan(free.value) & ~given
    larger = Decision(larger.yes, larger.doubtful | unspecified)
    return unbounded(value, unspecified), unbounded(slope, unspecified), larger


def explained_variance(v: Bounded, r: Bounded) -> Bounded:
    """1 - var(R - V) / var(R); 0 where the returns do not vary."""
    spread = _variance(r)
    unexplained = _variance(r - v)
    doubtful = (np.abs(spread.value) <= spread.error) & (spread.error > 0)
    explained = 1 - unexplained / spread
    if doubtful:
        return Bounded(explained.value, np.inf, v.arithmetic)
    return zeros(spread) if spread.value == 0 else explained


def _variance(x: Bounded) -> Bounded:
    if len(x.value) == 0:
        return x.sum()
    off = x - (mean(x) + zeros(x))
    return mean(off * off)


def kl_divergence(
    logprobs: Bounded, ref: Bounded, estimator: str, clamp: float | None
) -> tuple[Bounded, Bounded, Bounded]:
    """Return the estimates and their derivatives by both log-probabilities."""
    d, saturated = held(difference(ref, logprobs), -SATURATION, SATURATION)
    value, slope = kl_value(d, estimator)
    stuck = saturated
    if clamp is not None:
        value, clamped = held(value, -clamp, clamp)
        stuck = stuck | clamped
    slope = choose(stuck, zeros(d), slope)
    slope = where(np.isnan(value.value), value, slope)
    by_logprobs = where(np.isinf(logprobs.value), zeros(d), slope)
    return value, by_logprobs, where(np.isinf(ref.value), zeros(d), -slope)


def whiten(x: Bounded, *, shift_mean: bool) -> Bounded:
    """Return (x - mean) / sqrt(var + 1e-8) of the valid entries `[n]`, with the mean or not."""
    n = len(x.value)
    if n == 0:
        return x
    middle = mean(x) + zeros(x)
    off = x - middle
    variance = (off * off).sum() / float(n - 1) if n > 1 else x.sum() * 0.0
    total = variance + 1e-8
    root = np.sqrt(total.value)
    error = total.error / (2 * root)
    deviation = total.function(root, error, exact=False)
    white = off / (deviation + zeros(x))
    return white if shift_mean else white + middle
