"""The divergence of a student's rows from a teacher's, in float64, and its gradient.

With q of the student, p of the teacher, m = (1 - beta) q + beta p, and e_q, e_p the errors of their
logarithms, to first order

- KL(p, q), summed as p log p/q + q - p:  |q - p| e_q + |p log p/q| e_p,
- KL(q, p):  |q log q/p| e_q + |q - p| e_p,
- beta KL(p, m) + (1 - beta) KL(q, m):  |(1 - beta) q log q/m| e_q + |beta p log p/m| e_p,

and the roundings of each term and of the sum. The gradient of z is g (d_j - q_j sum d): the error
of d_j is q_j (e_q + e_p) with that of q_j times its logarithm. A logarithm of the mixture moves by
the other one's share of m, here beta p/m, for each unit of log q/p, and rounds relative to itself
and to that. A row of an infinite KL(q, p) has no gradient.
"""

import dataclasses

import numpy as np

from .bounded import FUNCTION_ROUNDINGS, Bounded, Decision, sum_roundings
from .rows import Rows

#: A logarithm of q/p of 2^50 bits is infinite.
EXCLUDED = 2.0**50 * np.log(2)
#: Of a term: two logarithms, an exponential, a log1p, and the operations between them.
TERM_ROUNDINGS = 4 * FUNCTION_ROUNDINGS


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Active rows of a student beside those of a teacher."""

    student: Rows
    teacher: Rows
    beta: float

    def __post_init__(self) -> None:
        keep = object.__setattr__
        s, t, beta, u = self.student, self.teacher, self.beta, self.student.arithmetic.unit
        q, p = s.p, t.p
        banned_q, banned_p = np.isneginf(s.z), np.isneginf(t.z)
        both = banned_q & banned_p
        with np.errstate(invalid="ignore"):
            log_ratio = np.where(both, 0.0, s.log_p - t.log_p)
            far = np.abs(log_ratio)
            log_ratio = np.where(far >= EXCLUDED, np.inf * np.sign(log_ratio), log_ratio)
            near_excluded = (np.abs(far / EXCLUDED - 1) < 0.01).any(1)
            mixture = np.logaddexp(
                s.log_p + np.log1p(-beta) if beta < 1 else np.full_like(q, -np.inf),
                t.log_p + np.log(beta) if beta > 0 else np.full_like(q, -np.inf),
            )
            of_q = {0.0: np.zeros_like(q), 1.0: log_ratio}.get(
                beta, np.where(q == 0, 0.0, -_mixed(beta, 1 - beta, -log_ratio))
            )
            of_p = {1.0: np.zeros_like(p), 0.0: -log_ratio}.get(
                beta, np.where(p == 0, 0.0, -_mixed(1 - beta, beta, log_ratio))
            )
        share_q, share_p = (1.0 if beta == 1 else 1 - beta), (1.0 if beta == 0 else beta)
        from_q = share_q * _times(q, of_q) if beta > 0 else np.zeros_like(q)
        from_p = share_p * _times(p, of_p) if beta < 1 else np.zeros_like(p)
        keep(self, "value", (from_q + from_p).sum(1))
        keep(self, "slope", q - p if beta == 0 else from_q)
        # the logarithm of a token that is excluded, by one or by both, is exact or has no effect
        exact_q = banned_q | s.nothing & (np.isinf(log_ratio) | t.nothing)
        exact_p = banned_p | t.nothing & (np.isinf(log_ratio) | s.nothing)
        e_q, e_p = (np.where(b, 0.0, r.log_p_error) for b, r in ((exact_q, s), (exact_p, t)))
        e_q, e_p = e_q + TERM_ROUNDINGS * u, e_p + TERM_ROUNDINGS * u
        distance = np.where(np.isfinite(log_ratio), np.abs(log_ratio), 0.0)
        e_y = e_q + e_p + 2 * u * distance
        excess = np.abs(q - p)
        near_q = excess if beta == 0 else np.abs(_finite(from_q)) + (excess if beta == 1 else 0)
        near_p = excess if beta == 1 else np.abs(_finite(from_p)) + (excess if beta == 0 else 0)
        size = np.abs(_finite(from_q)) + np.abs(_finite(from_p))
        if 0 < beta < 1:
            with np.errstate(invalid="ignore"):  # the shares of m
                of_student, of_teacher = (
                    np.where(x == 0, 0.0, share * np.exp(log - mixture))
                    for x, share, log in ((q, 1 - beta, s.log_p), (p, beta, t.log_p))
                )
            size = size + (share_q * q * of_teacher + share_p * p * of_student) * (1 + distance)
        else:
            size = size + q + p
        smallest = s.arithmetic.smallest
        adding = sum_roundings(s.vocabulary)
        error = (near_q * e_q + near_p * e_p).sum(1) * 1.5
        error = error + (TERM_ROUNDINGS + adding) * u * size.sum(1)
        # second order: the terms are convex, and grow like e^error
        error = error + (size * (e_y**2)).sum(1) + smallest * s.vocabulary
        # of an infinite product, a factor that may underflow to 0
        faint = np.isinf(from_q) & (q < 4 * smallest) | np.isinf(from_p) & (p < 4 * smallest)
        big = (np.maximum(e_q, e_p).max(1, initial=0.0) > 0.1) | faint.any(1)
        big = big | near_excluded | s.overflows | t.overflows
        keep(self, "error", np.where(big, np.inf, error))
        log = distance if beta == 1 else np.abs(_finite(of_q))
        d_error = (excess if beta == 0 else share_q * q) * e_y
        if beta == 0:  # a difference of two, or q expm1: of the smaller error
            d_error = np.minimum(s.p_error + t.p_error, np.maximum(q, p) * e_y * 1.5)
        elif beta < 1:
            moved = share_q * q * of_teacher * (e_y + TERM_ROUNDINGS * u * distance)
            d_error = moved * 1.5 + share_q * s.p_error * log
        else:
            d_error = d_error * 1.5 + share_q * s.p_error * (log + distance + 1)
        keep(self, "slope_error", d_error + TERM_ROUNDINGS * u * np.abs(_finite(self.slope)))
        total = np.abs(_finite(self.slope)).sum(1)
        keep(self, "mean", self.slope.sum(1) if beta > 0 else np.zeros(len(q)))
        # the sum of q - p is not 0 but what the normalizers are wrong by
        keep(self, "mean_error", self.slope_error.sum(1) + (adding + 1) * u * total)
        keep(self, "undefined", s.undefined | t.undefined)

    def divergence(self) -> Bounded:
        """Return the divergences `[N]`."""
        value = np.where(self.undefined, np.nan, np.maximum(self.value, 0.0))
        error = np.where(np.isfinite(value) | np.isinf(self.error), self.error, 0.0)
        # +inf instead of a softmax may leave a part of a comparison undefined
        return Bounded(value, np.where(self.undefined, np.inf, error), self.student.arithmetic)

    def agrees(self) -> Decision:
        """Return whether a column is the largest of both rows."""
        surely, maybe = [], []
        for rows in (self.student, self.teacher):
            top, of_top = rows.z.max(1, keepdims=True), 0.0
            of_top = np.where(rows.z == top, rows.z_error, 0.0).max(1, keepdims=True)
            largest = rows.x == rows.x.max(1, keepdims=True)
            surely.append(largest)
            maybe.append(rows.z + rows.z_error >= top - of_top)
        yes = (surely[0] & surely[1]).any(1)
        return Decision(yes, (maybe[0] & maybe[1]).any(1) & ~yes | self.undefined)

    def gradient(self, upstream: np.ndarray) -> Bounded:
        """Return dL/dx of the student for dL/ddivergence `[N]`."""
        s, u = self.student, self.student.arithmetic.unit
        without = np.isinf(self.value) & (self.beta == 1)
        g = np.where(without, 0.0, upstream)[:, None]
        q, mean = s.p, self.mean[:, None]
        with np.errstate(invalid="ignore"):
            inner = self.slope - _times(q, np.broadcast_to(mean, q.shape))
        inner = np.where(without[:, None], 0.0, inner)
        magnitude = np.abs(_finite(self.slope)) + np.abs(_finite(q * mean))
        error = self.slope_error + q * self.mean_error[:, None] + s.p_error * np.abs(_finite(mean))
        error = error + TERM_ROUNDINGS * u * magnitude
        banned = np.isneginf(s.z)
        inner, error = (np.where(banned & ~np.isnan(inner), 0.0, x) for x in (inner, error))
        value = np.where(g == 0, 0.0, g * inner) * s.slope
        total = np.abs(g) * (np.abs(s.slope) * error + (np.abs(inner) + error) * s.slope_error)
        # a probability that underflows does so before it is multiplied
        underflow = s.arithmetic.smallest * (1 + 4 * np.abs(g) * np.abs(s.slope))
        total = np.where(g == 0, 0.0, total + 4 * u * np.abs(value) + underflow)
        lost = np.isinf(self.error) | self.undefined
        # unspecified where there is no distribution, or too little is known of it
        unknown = lost[:, None] & (g != 0) | self.undefined[:, None]
        unknown = unknown | np.isnan(g) & (q == 0) | np.isinf(g)
        beyond = np.abs(value) + total > s.arithmetic.largest
        beyond = beyond | (np.abs(g) * (magnitude + 1) * np.abs(s.slope) > s.arithmetic.largest)
        total = np.where(unknown | beyond | np.isnan(total), np.inf, total)
        return Bounded(value, np.where(np.isnan(value) & ~unknown, 0.0, total), s.arithmetic)


def _mixed(share: float, rest: float, distance: np.ndarray) -> np.ndarray:
    """Return log(rest + share e^distance) of shares that add up to 1, however small one is."""
    if not share or not rest:
        return np.zeros_like(distance)
    near = share * np.expm1(np.minimum(distance, 700.0))
    far = np.logaddexp(np.log(rest), np.log(share) + distance)
    return np.where(np.abs(near) < 0.5, np.log1p(np.maximum(near, -0.5)), far)


def _times(probability: np.ndarray, log: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.where(probability == 0, 0.0, probability * log)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0.0)
