"""Float64 values with a bound on the error that a narrower arithmetic may make.

An implementation rounds after every operation. Applied to `x` with the error `e`, the operation `f`
in an arithmetic of unit roundoff `u` returns `f(x)` with an error of at most

    |f(x + e) - f(x)|  +  roundings * u |f(x)|  +  underflow,

where underflow is the smallest normal number, since a kernel may flush smaller ones to 0. A result
beyond the largest number has an infinite error: anything derived from it is accepted. Bounds follow
from the formulas; none is tuned to a case.

An operation on exact operands with a representable result is exact, and a decision based on it (is
a ratio beyond a clip bound?) is certain. A decision between sides that are closer than their errors
is in doubt: `choose` then covers both results, and `Doubts` counts it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable

import numpy as np

#: exp, log, tanh and the like: two units in the last place, which are four unit roundoffs.
FUNCTION_ROUNDINGS = 4
#: A sum of n terms rounds n - 1 times; with probability 1 - 2 exp(-lambda^2 / 2), here 1 - 3e-14,
#: these roundings add up to lambda sqrt(n) (Higham and Mary 2019, SIAM J. Sci. Comput. 41).
SUM_LAMBDA = 8.0
#: float32 holds the multiples of this up to 2^14, so sums of such terms are exact.
GRID = 2.0**-10


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """A binary floating-point format: unit roundoff, smallest normal, largest, smallest number."""

    name: str
    unit: float
    smallest: float
    largest: float
    subnormal: float

    def holds_sum(self, a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
        """Return where a + b, which float64 rounds to `total`, is representable in this format."""
        if self is not FLOAT64:
            return _float32(total) == total
        part = total - a  # the rounding error of float64 (Knuth's two-sum)
        return (a - (total - part)) + (b - part) == 0

    def holds_product(self, a: np.ndarray, b: np.ndarray, product: np.ndarray) -> np.ndarray:
        """Return where a b, which float64 rounds to `product`, is representable in this format."""
        if self is not FLOAT64:
            return _float32(product) == product  # two float32 make an exact float64
        return (np.abs(a) == 1) | (np.abs(b) == 1) | (product == 0)


def _float32(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).astype(np.float64)


# the oracle computes in float64 itself, so against a float64 result both round
FLOAT64 = Arithmetic("float64", 2.0**-52, 2.0**-1022, float(np.finfo(np.float64).max), 2.0**-1074)
FLOAT32 = Arithmetic("float32", 2.0**-24, 2.0**-126, float(np.finfo(np.float32).max), 2.0**-149)
FLOAT16 = Arithmetic("float16", 2.0**-11, 2.0**-14, 65504.0, 2.0**-24)
BFLOAT16 = Arithmetic("bfloat16", 2.0**-8, 2.0**-126, 2.0**127 * (2 - 2.0**-7), 2.0**-133)
FORMATS = {each.name: each for each in (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)}


def of_results(*dtypes: str) -> Arithmetic:
    """Return the format of the arithmetic: float32, or float64 if an operand has it."""
    return FLOAT64 if "float64" in dtypes else FLOAT32


def sum_roundings(terms: int) -> float:
    """Error of a sum of this many terms, in unit roundoffs of the sum of magnitudes."""
    return min(max(terms - 1, 0), SUM_LAMBDA * terms**0.5)


@dataclasses.dataclass
class Doubts:
    """The number of decisions of a case that are within rounding of their bound, by kind."""

    counts: Counter = dataclasses.field(default_factory=Counter)

    def add(self, kind: str, where: np.ndarray) -> None:
        found = int(np.count_nonzero(where))
        if found:
            self.counts[kind] += found


@dataclasses.dataclass(frozen=True)
class Decision:
    """A yes or no for every entry, and where rounding may flip it."""

    yes: np.ndarray
    doubtful: np.ndarray

    def __and__(self, other: Decision | np.ndarray) -> Decision:
        other = other if isinstance(other, Decision) else certain(other)
        either = (self.doubtful & (other.yes | other.doubtful)) | (
            other.doubtful & (self.yes | self.doubtful)
        )
        return Decision(self.yes & other.yes, either)

    def __or__(self, other: Decision) -> Decision:
        return ~(~self & ~other)

    def __invert__(self) -> Decision:
        return Decision(~self.yes, self.doubtful)

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> Decision:
        """Return what the function makes of answers and of doubts."""
        return Decision(change(self.yes), change(self.doubtful))

    def __getitem__(self, index: object) -> Decision:
        return self.map(lambda x: x[index])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.yes.shape

    def covers(self, got: np.ndarray) -> np.ndarray:
        """Return where these answers agree, or may differ."""
        return (got == self.yes) | self.doubtful


def certain(yes: np.ndarray) -> Decision:
    """A decision without doubt."""
    yes = np.asarray(yes, bool)
    return Decision(yes, np.zeros(yes.shape, bool))


class Bounded:
    """Values, bounds on their errors, and the arithmetic that computes them."""

    __slots__ = ("arithmetic", "error", "value")
    __array_priority__ = 1  # so that an array on the left leaves the operation to this class

    def __init__(self, value: object, error: object, arithmetic: Arithmetic) -> None:
        self.value = np.asarray(value, np.float64)
        error = np.asarray(error, np.float64)
        same = error.shape == self.value.shape
        self.error = error if same else np.broadcast_to(error, self.value.shape)
        self.arithmetic = arithmetic

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def covers(self, got: np.ndarray) -> np.ndarray:
        """Return where these numbers are within the bounds; NaN and infinities must be equal."""
        equal = (got == self.value) | (np.isnan(got) & np.isnan(self.value))
        return equal | (np.abs(got - self.value) <= self.error) | np.isinf(self.error)

    def like(self, value: object) -> Bounded:
        """Return a constant: exact if the arithmetic holds it, else rounded once."""
        if isinstance(value, Bounded):
            return value
        return constant(value, self.arithmetic)

    def _made(
        self, value: np.ndarray, error: np.ndarray, sure: object, exact: object, by: object = 1.0
    ) -> Bounded:
        """Add the error of the operation itself; `sure` says where inf and NaN are no accident."""
        u = self.arithmetic
        magnitude = np.abs(value)
        rounding = by * u.unit * (magnitude + error) + np.where(value == 0, 0.0, u.smallest)
        error = error + np.where(exact, 0.0, rounding)
        error = np.where((magnitude + error > u.largest) | np.isnan(error), np.inf, error)
        return Bounded(value, np.where(np.isfinite(value) | ~np.asarray(sure), error, 0.0), u)

    def _certain(self) -> np.ndarray:
        """Say where sign, and being 0, infinite or NaN, are beyond doubt."""
        return (self.error == 0) | (np.abs(self.value) > self.error)

    def __add__(self, other: object) -> Bounded:
        other = self.like(other)
        value = self.value + other.value
        error = self.error + other.error
        exact = (error == 0) & self.arithmetic.holds_sum(self.value, other.value, value)
        return self._made(value, error, np.isfinite(error), exact)

    __radd__ = __add__

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.error, self.arithmetic)

    def __sub__(self, other: object) -> Bounded:
        return self + -self.like(other)

    def __rsub__(self, other: object) -> Bounded:
        return self.like(other) + -self

    def __mul__(self, other: object) -> Bounded:
        other = self.like(other)
        a, b = np.abs(self.value), np.abs(other.value)
        value = self.value * other.value
        error = _product(a, other.error) + _product(b, self.error) + self.error * other.error
        exact = (error == 0) & self.arithmetic.holds_product(self.value, other.value, value)
        return self._made(value, error, self._certain() & other._certain(), exact)

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> Bounded:
        other = self.like(other)
        value = self.value / other.value
        room = np.maximum(np.abs(other.value) - other.error, 0)
        error = (self.error + _product(np.abs(value), other.error)) / room
        error = np.where((self.error == 0) & (other.error == 0), 0.0, error)
        power_of_two = np.abs(np.frexp(other.value)[0]) == 0.5
        exact = (error == 0) & (power_of_two | (self.value == 0))
        sure = self._certain() & other._certain()
        return self._made(value, error, sure, exact, 2)  # 2: by the rounded reciprocal

    def __abs__(self) -> Bounded:
        return Bounded(np.abs(self.value), self.error, self.arithmetic)

    def function(
        self, value: np.ndarray, error: np.ndarray, exact: object, by: object = 0.0
    ) -> Bounded:
        """Return values of a function with the error that its argument's error makes."""
        return self._made(value, error, np.isfinite(error), exact, FUNCTION_ROUNDINGS + by)

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> Bounded:
        """Return what the function makes of values and of errors."""
        return Bounded(change(self.value), change(self.error), self.arithmetic)

    def __getitem__(self, index: object) -> Bounded:
        return self.map(lambda x: x[index])

    def reshape(self, *shape: int | tuple[int, ...]) -> Bounded:
        return self.map(lambda x: x.reshape(*shape))

    def sum(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Bounded:
        """Return sums, with the error of their terms and of the additions."""
        u = self.arithmetic
        value = self.value.sum(axis, keepdims=keepdims)
        finite = np.where(np.isfinite(self.value), np.abs(self.value), 0.0)
        magnitude = finite.sum(axis, keepdims=keepdims)
        terms = (self.value != 0).sum(axis, keepdims=keepdims)
        on_grid = (self.value % GRID == 0).all(axis, keepdims=keepdims)
        on_grid &= magnitude < GRID / max(u.unit, 2.0**-24)
        error = self.error.sum(axis, keepdims=keepdims)
        exact = (error == 0) & (on_grid | (terms <= 1))
        most = np.minimum(np.maximum(terms - 1, 0), SUM_LAMBDA * np.sqrt(terms))
        error = error + np.where(exact, 0.0, most * u.unit * magnitude)
        # partial sums may overflow where the sum does not
        error = np.where(magnitude > u.largest, np.inf, error)
        return self._made(value, error, np.isfinite(error), True)


def _product(magnitude: np.ndarray, error: np.ndarray) -> np.ndarray:
    """|x| e, where nothing comes of no error: inf * 0 is 0 here."""
    return np.where(error == 0, 0.0, magnitude * error)


def constant(value: object, arithmetic: Arithmetic) -> Bounded:
    """Return a number as represented in the arithmetic: exactly, or rounded once."""
    if isinstance(value, float | int):
        return _number(float(value), arithmetic)
    return _constant(value, arithmetic)


@functools.lru_cache(maxsize=1000)
def _number(value: float, arithmetic: Arithmetic) -> Bounded:
    return _constant(value, arithmetic)


def _constant(value: object, arithmetic: Arithmetic) -> Bounded:
    value = np.asarray(value, np.float64)
    exact = arithmetic.holds_sum(value, np.zeros(()), value) | ~np.isfinite(value)
    error = np.where(exact, 0.0, arithmetic.unit * np.abs(value) + arithmetic.subnormal)
    return Bounded(value, error, arithmetic)


def where(condition: np.ndarray, yes: Bounded, no: Bounded) -> Bounded:
    """Return `yes` or `no`, entry by entry."""
    return Bounded(
        np.where(condition, yes.value, no.value),
        np.where(condition, yes.error, no.error),
        yes.arithmetic,
    )


def choose(decision: Decision, yes: Bounded, no: Bounded) -> Bounded:
    """Return `yes` or `no`, entry by entry; where the decision is in doubt, a bound of both."""
    chosen = where(decision.yes, yes, no)
    other = where(decision.yes, no, yes)
    both = np.maximum(chosen.error, np.abs(chosen.value - other.value) + other.error)
    both = np.where(chosen.value == other.value, np.maximum(chosen.error, other.error), both)
    both = np.where(np.isnan(both), np.inf, both)
    return Bounded(
        np.where(decision.doubtful & np.isnan(chosen.value), other.value, chosen.value),
        np.where(decision.doubtful, both, chosen.error),
        chosen.arithmetic,
    )


def unbounded(x: Bounded, where_: np.ndarray) -> Bounded:
    """Return x with anything accepted at some places."""
    return Bounded(x.value, np.where(where_, np.inf, x.error), x.arithmetic)


def beyond(a: Bounded, bound: object) -> Decision:
    """Decide a > bound; False where one of them is NaN, in doubt where it may be anything."""
    bound = a.like(bound)
    yes = a.value > bound.value
    error = a.error + bound.error
    near = np.abs(a.value - bound.value) <= error
    near = near & (error > 0) & ~np.isnan(a.value) & ~np.isnan(bound.value)
    return Decision(yes, near | np.isinf(error))
