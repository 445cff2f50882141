"""The functions in the formulas, with the errors from their arguments and evaluation."""

import numpy as np

from .bounded import FORMATS, Bounded, Decision, beyond, choose, where


def exp(x: Bounded) -> Bounded:
    """Return e^x; kernels compute 2^(x log2 e), which adds |x| roundings of the argument."""
    value = np.exp(x.value)
    finite = np.where(np.isfinite(x.value), x.value, 0.0)
    grown = np.where(x.error == 0, 0.0, value * np.expm1(x.error))
    return x.function(value, grown, (x.error == 0) & ((value == 1) | (value == 0)), abs(finite))


def expm1(x: Bounded) -> Bounded:
    """Return e^x - 1, with a relative error where x is small."""
    value = np.expm1(x.value)
    finite = np.where(np.isfinite(x.value), x.value, 0.0)
    grown = np.where(x.error == 0, 0.0, np.exp(x.value) * np.expm1(x.error))
    exact = (x.error == 0) & ((value == 0) | np.isinf(x.value))
    return x.function(value, grown, exact, abs(finite))


def log(x: Bounded) -> Bounded:
    """Return log x; NaN below 0, anything where the sign is in doubt."""
    unsure = (np.abs(x.value) <= x.error) & (x.error > 0)
    value = np.log(np.where(unsure, 1.0, x.value))
    room = np.where(unsure | (x.error == 0), 1.0, np.abs(x.value) - x.error)
    grown = np.where(unsure, np.inf, np.log1p(np.where(unsure, 0.0, x.error / room)))
    return x.function(value, grown, (x.error == 0) & ((value == 0) | ~np.isfinite(value)))


def sigmoid(x: Bounded) -> Bounded:
    """Return 1 / (1 + e^-x)."""
    value = 1 / (1 + np.exp(-x.value))
    high, low = (1 / (1 + np.exp(-(x.value + side * x.error))) for side in (1, -1))
    grown = np.maximum(high - value, value - low)
    by = np.where(np.isfinite(x.value), np.minimum(np.abs(x.value), 100.0), 0.0)
    return x.function(value, np.where(x.error == 0, 0.0, grown), np.isinf(x.value), by)


def maximum(a: Bounded, b: object) -> Bounded:
    """Return the larger; NaN if either is."""
    b = a.like(b)
    larger = choose(beyond(b, a), b, a)
    return where(np.isnan(b.value), b + a, larger)


def minimum(a: Bounded, b: object) -> Bounded:
    return -maximum(-a, -a.like(b))


def held(x: Bounded, low: object, high: object) -> tuple[Bounded, Decision]:
    """Return x clamped to [low, high], and where it is beyond them; NaN stays NaN."""
    low, high = x.like(low), x.like(high)
    over, under = beyond(x, high), beyond(low, x)
    full = np.zeros(x.shape)
    value = choose(over, high + full, choose(under, low + full, x))
    return value, over | under


def mean(x: Bounded, axis: int | None = None) -> Bounded:
    return x.sum(axis) / float(x.value.size if axis is None else x.shape[axis])


def stored(x: Bounded, dtype: str, waited_for: float | None = None) -> Bounded:
    """Return x as stored in this dtype: rounded once more, subnormal or flushed.

    The gradient of a loss is computed with the loss and stored in the dtype of its tensor. The
    backward multiplies it by the upstream gradient that it `waited_for`, which rounds it again.
    """
    kept = FORMATS[dtype]
    waited_for = None if waited_for is not None and np.isnan(waited_for) else waited_for
    if waited_for is not None:
        some = (x.value != 0) | (x.error != 0)
        underflow = np.where(some, x.arithmetic.smallest * abs(waited_for), 0.0)
        x = Bounded(x.value, x.error + underflow, x.arithmetic)
    if kept.unit <= x.arithmetic.unit:
        return x
    waited = waited_for is not None and abs(np.frexp(waited_for)[0]) != 0.5
    rounding = kept.unit * (np.abs(x.value) + x.error) * (1 + 2 * waited)
    rounding = rounding + kept.subnormal / 2 * (1 + abs(waited_for or 0.0))
    error = x.error + np.where((x.value == 0) & (x.error == 0), 0.0, rounding)
    infinite = (np.abs(x.value) - error > 2 * kept.largest) & np.isfinite(x.value)
    error = np.where(np.abs(x.value) + error > kept.largest, np.inf, error)
    error = np.where(np.isfinite(x.value), error, x.error)
    value = np.where(infinite, np.copysign(np.inf, x.value), x.value)
    return Bounded(value, np.where(infinite, 0.0, error), x.arithmetic)
