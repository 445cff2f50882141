"""The sampler's expected score, from the log-probabilities of tokens H.

    C = sum_H sg[m - alpha p] log p,   dC/dz_j = c_j [j in H] - p_j sum_H c,   c = m - alpha p

with m = q w(p / q), alpha = rho w(1 / rho), rho = (1 - sum_H q) / max(1 - sum_H p, 1e-6). A token
that the policy excludes is a constant: its c is 0.

Values are these formulas as they stand. Rounding leaves 1 - sum_H p with an absolute error e of
some unit roundoffs, and alpha, where it follows rho, with the relative error e / (1 - sum_H p),
which is large where H has nearly all. It cancels in the gradient: written as

    dC/dz_j = m_j - p_j (sum_H m + D) in H,   -p_j (sum_H m - alpha sum_H p) elsewhere,

alpha moves the first by D = alpha (1 - sum_H p) alone, which is 1 - sum_H q without a correction,
and the second by p_j, whose sum is 1 - sum_H p. The bounds are those of this form: an evaluation
that multiplies the error of alpha with the p of H exceeds them.
"""

import numpy as np

from .bounded import (
    FUNCTION_ROUNDINGS,
    Bounded,
    Decision,
    Doubts,
    beyond,
    certain,
    choose,
    constant,
    unbounded,
    where,
)
from .functions import exp, held, log, maximum, minimum
from .masks import estimate
from .rows import Rows
from .terms import SATURATION, difference, zeros

LEAST_TAIL = 1e-6


class Centering:
    """The expected score of active rows: `ids` `[N, K]` of H, -1 for none, and their log q.

    `weights` are the rollout corrections of tokens.
    """

    def __init__(
        self, rows: Rows, ids: np.ndarray, sampled: np.ndarray, weights: list[dict], doubts: Doubts
    ) -> None:
        self.rows, self._weights, self._doubts = rows, weights, doubts
        u, absent = rows.arithmetic, ids < 0
        self._known = ~absent
        place = np.arange(rows.n)[:, None] + np.zeros_like(ids), np.where(absent, 0, ids)
        self._place = tuple(x[self._known] for x in place)
        # z is rounded before the largest is subtracted, as it is not in the kernels
        top = np.where(rows.z == rows.top, rows.z_error, 0.0).max(1, keepdims=True, initial=0.0)
        excluded = absent | np.isneginf(rows.z[place])
        log_p = Bounded(
            np.where(excluded, -np.inf, rows.log_p[place]),
            np.where(excluded, 0.0, rows.log_p_error[place] + 2 * top),
            u,
        )
        p_error = rows.p_error + (rows.p + rows.p_error) * np.expm1(np.minimum(2 * top, 1.0))
        p = Bounded(*(np.where(excluded, 0.0, x[place]) for x in (rows.p, p_error)), u)
        log_q = constant(np.where(absent, -np.inf, sampled), u)
        q = exp(log_q)
        head_q, head_p = (x.sum(1, keepdims=True) for x in (q, p))
        tail_q, tail = maximum(1 - head_q, 0.0), 1 - head_p
        self._tails(tail_q, tail)
        m = self._weighed(p, q, self._dropped(difference(log_p, log_q)))
        m = where(excluded, zeros(m), m)
        dropped, one = self._dropped(-self._log_rho), 1 + zeros(tail)
        self._alpha = alpha = self._weighed(one, self._rho, dropped)
        through = self._weighed(tail, tail_q * minimum(tail / LEAST_TAIL, 1.0), dropped)  # D
        self._m, self._p = m, p
        all_m = m.sum(1, keepdims=True)
        self._inside, self._elsewhere = all_m + through, all_m - alpha * head_p
        lost = rows.undefined | rows.overflows
        self._lost = lost | (~excluded & (2 * np.abs(log_p.value) > u.largest)).any(1)
        c = m - alpha * p
        self.term = unbounded(where(excluded, zeros(c), c * log_p).sum(1), self._lost)
        self.mass = head_q[:, 0]
        gone = absent | (q.value == 0)
        faint = (~gone & excluded & (q.value < 4 * u.smallest)).any(1)
        apart = where(gone, zeros(q), q * difference(log_q, log_p)).sum(1)
        self.head_kl = unbounded(apart + self._tail_kl, self._lost | faint)

    def _tails(self, q: Bounded, p: Bounded) -> None:
        """Keep rho, its logarithm and q log rho, by intervals: nothing is below its bound."""
        low_q, high_q = np.maximum(q.value - q.error, 0.0), q.value + q.error
        low_p, at, high_p = (
            np.maximum(x, LEAST_TAIL) for x in (p.value - p.error, p.value, p.value + p.error)
        )
        unit, rho = 4 * q.arithmetic.unit, q.value / at
        low, high = low_q / high_p * (1 - unit), high_q / low_p * (1 + unit)
        self._rho = Bounded(rho, np.maximum(high - rho, rho - low), q.arithmetic)
        edges = np.log(np.array([low, rho, high])).clip(-SATURATION, SATURATION)
        half = (edges[2] - edges[0]) / 2
        self._log_rho = log(Bounded(rho, 0.0, q.arithmetic))
        self._log_rho = Bounded(edges[0] + half, half + self._log_rho.error, q.arithmetic)
        value = np.where(q.value == 0, 0.0, q.value * np.log(rho))
        # of x log x down to 0, where it is between 0 and its value or -1/e at the other end
        whole = high_q * (1 + np.abs(np.log(high_q / low_p)) + np.abs(np.log(high_q / high_p)))
        far = np.abs(edges).max(0)
        part = q.error * (far + 1) + high_q * (2 * half + unit * (far + 1))
        error = np.where(high_q == 0, 0.0, np.where(low_q > 0, part, whole + np.abs(value)))
        self._tail_kl = Bounded(value, error, q.arithmetic)[:, 0]

    def _dropped(self, log_ratio: Bounded) -> Decision:
        """Return which weights are 0, by masks and filters of log p/q."""
        found = certain(np.zeros(log_ratio.shape, bool))
        for one in self._weights:
            if one["kind"] == "truncate":
                continue
            low, high = (zeros(log_ratio) + one[name] for name in ("low", "high"))
            x = estimate(log_ratio, one["estimator"])
            if one["estimator"] == "ratio":  # an exponential, compared with the bounds
                low, high, x = log(low), log(high), held(x, -SATURATION, SATURATION)[0]
                rounds = (FUNCTION_ROUNDINGS + 2 + np.abs(x.value)) * x.arithmetic.unit
                x = Bounded(x.value, x.error + rounds, x.arithmetic)
            found = found | beyond(low, x) | beyond(x, high)
        self._doubts.add("score centering", found.doubtful)
        return found

    def _weighed(self, p: Bounded, q: Bounded, dropped: Decision) -> Bounded:
        """Return q w(p / q)."""
        result = q
        for one in self._weights:
            if one["kind"] == "truncate":
                high = zeros(q) + np.inf if np.isinf(one["high"]) else q * one["high"]
                result = held(p, q * one["low"], high)[0]
            elif one["kind"] == "mask":
                result = p
        return choose(dropped, zeros(result), result)

    def gradient(self, factor: Bounded) -> Bounded:
        """Return dL/dx `[N, V]` of factors `[N]` of C."""
        rows, u = self.rows, self.rows.arithmetic
        inside = np.zeros(rows.x.shape, bool)
        inside[self._place] = True
        m, m_error = np.zeros((2, *inside.shape))
        m[self._place], m_error[self._place] = (
            x[self._known] for x in (self._m.value, self._m.error)
        )
        p, p_error = rows.p.copy(), rows.p_error.copy()
        p[self._place], p_error[self._place] = (
            x[self._known] for x in (self._p.value, self._p.error)
        )
        c = np.where(inside, m - self._alpha.value * p, 0.0)
        slope = c - p * c.sum(1, keepdims=True)
        by = where(inside, self._inside, self._elsewhere)
        error = (Bounded(m, m_error, u) - Bounded(p, p_error, u) * by).error
        # the roundings of the values themselves
        size = np.abs(m) + np.abs(self._alpha.value) * p
        error = error + 2.0**-50 * (size + p * np.where(inside, size, 0.0).sum(1, keepdims=True))
        result = Bounded(slope, error, u) * factor.reshape(-1, 1)
        result = result * Bounded(rows.slope, rows.slope_error, u)
        idle = ((factor.value == 0) & (factor.error == 0))[:, None]
        result = unbounded(result, self._lost[:, None])
        return where(idle | np.isneginf(rows.z) & ~self._lost[:, None], zeros(result), result)
