"""The token functions of softmax(z), z = softcap(scale x) / temperature, in float64.

The bounds of error, in unit roundoffs u, with t_j = z_j - max z and s = sum exp t_j:

- z: a rounding per scalar and operation, relative; what comes in (a GEMM's error) times dz/dx;
- s: of each term 1 + |t_j| for the argument, `FUNCTION_ROUNDINGS` for exp, then the additions, and
  `RESCALINGS` for bringing parts of a row to one maximum; relative, as no term is negative;
- log p: the errors of s, of log s and of the subtractions; the error of the maximum cancels;
- p_j: e^(log p_j) with the error of its argument; gradients: of every term, so that where terms
  cancel the bound follows their magnitudes.
"""

import dataclasses

import numpy as np

from .bounded import FUNCTION_ROUNDINGS, Arithmetic, Bounded, Decision, constant, sum_roundings

RESCALINGS = 2 * (FUNCTION_ROUNDINGS + 1)
NOTHING = 1000.0  # nats below the largest, where even float64 has no probability


@dataclasses.dataclass(frozen=True)
class Head:
    """How logits become z: the scalars that every token function takes."""

    temperature: np.ndarray  # [N]
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    #: whether tanh is made from e^x, whose terms cancel where it is small
    tanh_by_exp: bool = False


class Rows:
    """Active rows `[N, V]`: their statistics and gradient."""

    def __init__(
        self,
        x: np.ndarray,
        ids: np.ndarray,
        head: Head,
        arithmetic: Arithmetic,
        x_error: object = 0.0,
    ) -> None:
        self.arithmetic, self.ids = arithmetic, ids
        self.n, self.vocabulary = x.shape
        self._all = np.arange(self.n)
        self._squash(x, np.broadcast_to(x_error, x.shape), head)
        self._normalise()

    def _squash(self, x: np.ndarray, x_error: np.ndarray, head: Head) -> None:
        """z, its error, and dz/dx with its own."""
        u = self.arithmetic
        temperature = head.temperature[:, None]
        rounds = 0.0
        if head.logit_scale != 1:
            rounds += 1 + (constant(head.logit_scale, u).error > 0)
        if (temperature != 1).any():
            rounds += 2 + (constant(head.temperature, u).error > 0).any()
        factor = head.logit_scale / temperature
        self.slope = np.broadcast_to(factor, x.shape)
        slope_error = np.abs(self.slope) * rounds * u.unit
        if head.logit_softcap is None:
            z = x * head.logit_scale / temperature
            z = np.where(np.isinf(x), x, z)
            cap = 0.0
        else:
            cap = head.logit_softcap
            argument_rounds = rounds + 2 + (constant(cap, u).error > 0)
            squashed = np.tanh(x * head.logit_scale / cap)
            z = cap * squashed / temperature
            z = np.where(np.isneginf(x), x, z)  # a banned token stays banned
            rounds = argument_rounds + FUNCTION_ROUNDINGS + 2
            self.slope = (1 - squashed**2) * factor
            # 1 - tanh^2 cancels: its error follows its terms, and the argument's
            cancelling = (1 + squashed**2) + 2 * rounds * squashed**2
            slope_error = np.abs(factor) * (cancelling + rounds) * u.unit
            curvature = 2 * np.abs(squashed) * (1 - squashed**2) * abs(head.logit_scale) / cap
            slope_error = slope_error + np.abs(factor) * curvature * x_error
        magnitude = np.where(np.isfinite(z), np.abs(z), 0.0)
        underflow = u.smallest * (1 + cap) * (1 + 1 / temperature) * (rounds > 0)
        error = rounds * u.unit * magnitude + self.slope * x_error + underflow
        if head.tanh_by_exp:
            error = error + FUNCTION_ROUNDINGS * u.unit * cap / temperature
        self.slope_error = slope_error
        with_differences = 2 * np.maximum(magnitude, np.where(np.isfinite(x), np.abs(x), 0))
        # a column far below the largest may overflow to -inf: it has no probability either way
        top = z == z.max(1, keepdims=True, initial=-np.inf)
        overflows = (with_differences > u.largest) & np.isfinite(z)
        # a row with NaN has NaN, whatever overflows beside it
        self.overflows = (overflows & ((z > 0) | top)).any(1) & ~np.isnan(z).any(1)
        self.z = z
        self.z_error = np.where(np.isfinite(z), error, 0.0)
        self.x = x
        #: rows with NaN or inf, or with nothing but -inf: they have no softmax
        self.undefined = ~np.isfinite(z.max(1, initial=-np.inf))

    def _normalise(self) -> None:
        u = self.arithmetic.unit
        z, e = self.z, self.z_error
        top = z.max(1, keepdims=True)
        #: columns that have no probability, whatever the errors of their logits
        self.nothing = z + e < top - e.max(1, keepdims=True, where=z == top, initial=0) - NOTHING
        e = np.where(self.nothing, 0.0, e)
        t = z - top  # NaN where the row holds NaN or inf, or is -inf all over
        exponentials = np.exp(t)
        s = exponentials.sum(1, keepdims=True)
        p = exponentials / s
        distance = np.where(np.isfinite(t), -t, 0.0)
        adding = sum_roundings(self.vocabulary)
        per_term = FUNCTION_ROUNDINGS + 1 + 2 * distance
        self.log_s = np.log(s)
        # relative error of s, without and with the error of z
        own = (p * per_term).sum(1, keepdims=True) * u + (adding + RESCALINGS) * u
        # of small errors of z the first order and a quarter; of others the largest of the row
        most = e.max(1, keepdims=True, initial=0.0)
        small = most < 0.1
        inherited = np.where(small, 1.25 * (p * e).sum(1, keepdims=True), most)
        log_error = own + FUNCTION_ROUNDINGS * u * self.log_s
        self.log_p = t - self.log_s
        away = np.where(np.isfinite(self.log_p), -self.log_p, 0.0)
        self.log_p_error = self.z_error + inherited + log_error + u * (distance + away)
        self.p = p
        # p may be made as exp(t) / s or as exp(log p)
        relative = self.log_p_error + (FUNCTION_ROUNDINGS + 2 + distance + away) * u
        highest = np.exp(np.minimum(np.where(np.isneginf(z), z, self.log_p + relative), 0.0))
        down = -p * np.expm1(-relative)
        self.p_error = np.maximum(highest - p, down) + self.arithmetic.smallest
        self.p_error = np.where(np.isneginf(z), 0.0, self.p_error)
        self.top, self.t, self.distance = top, t, distance
        weighted = (p * distance).sum(1, keepdims=True)
        self.entropy_value = self.log_s + weighted
        sensitivity = np.where(
            p > 0, p * np.abs(np.where(p > 0, self.log_p, 0) + self.entropy_value), 0
        )
        self.entropy_error = (
            1.25 * (sensitivity * e).sum(1, keepdims=True)
            + log_error
            + own * weighted
            + (p * distance * per_term).sum(1, keepdims=True) * u
            + adding * u * weighted
            + 2 * u * self.entropy_value
        )
        everything = np.log(self.vocabulary) + self.entropy_error
        self.entropy_error = np.where(small, self.entropy_error, everything)
        self.lse_error = inherited + log_error + u * np.abs(top + self.log_s)
        self.squares = (p * p).sum(1)
        self.squares_error = ((2 * p + self.p_error) * self.p_error).sum(1) + (
            adding + 2
        ) * u * self.squares

    def _of_rows(self, value: np.ndarray, error: np.ndarray) -> Bounded:
        error = np.where(self.overflows, np.inf, np.where(np.isfinite(value), error, 0.0))
        # of two numbers, whose difference may overflow in units of log 2
        beyond = np.isfinite(value) & (2 * np.abs(value) > self.arithmetic.largest)
        error = np.where(beyond, np.inf, error)
        return Bounded(value, np.where(np.isnan(error), np.inf, error), self.arithmetic)

    @property
    def logprobs(self) -> Bounded:
        chosen = (self._all, self.ids)
        return self._of_rows(self.log_p[chosen], self.log_p_error[chosen])

    @property
    def entropy(self) -> Bounded:
        return self._of_rows(self.entropy_value[:, 0], self.entropy_error[:, 0])

    @property
    def logsumexp(self) -> Bounded:
        value = np.where(np.isneginf(self.top), -np.inf, self.top + self.log_s)  # log of no terms
        return self._of_rows(value[:, 0], self.lse_error[:, 0])

    @property
    def sum_sq_probs(self) -> Bounded:
        return self._of_rows(self.squares, self.squares_error)

    @property
    def is_top1(self) -> Decision:
        chosen = (self._all, self.ids)
        z, e = self.z[chosen][:, None], self.z_error[chosen][:, None]
        equal = (self.x == self.x[chosen][:, None]) & (e == self.z_error)
        surely_above = self.z - self.z_error > z + e
        surely_not = (
            equal | (self.z + self.z_error < z - e) | (self.z == z) & (self.z_error + e == 0)
        )
        surely_not[chosen] = True
        yes = ~(self.z > z).any(1)
        doubtful = ~surely_above.any(1) & ~surely_not.all(1)
        return Decision(yes, doubtful | self.overflows | self.undefined)

    def gradient(self, logprobs: Bounded, entropy: Bounded, logsumexp: Bounded) -> Bounded:
        """Return dL/dx of upstream gradients `[N]`, zeros for an output that has none."""
        u = self.arithmetic.unit
        g_l, g_h, g_s = (g.value[:, None] for g in (logprobs, entropy, logsumexp))
        e_l, e_h, e_s = (g.error[:, None] for g in (logprobs, entropy, logsumexp))
        p, banned = self.p, np.isneginf(self.z)
        log_p = np.where(p > 0, self.log_p, 0.0)
        centred = np.where(p > 0, log_p + self.entropy_value, 0.0)
        chosen = (self._all, self.ids)
        share = -p  # of the chosen one 1 - p
        share[chosen] += 1
        value = np.where(g_l == 0, 0, g_l * share) + np.where(g_h == 0, 0, -g_h * p * centred)
        value = value + np.where(g_s == 0, 0, g_s * p)
        far = np.where(np.isfinite(self.log_p), np.abs(self.log_p), 0.0)
        away = far + self.entropy_value + self.distance + self.log_s
        asked = np.where((g_h == 0) & (e_h == 0), 0, (np.abs(g_h) + e_h) * away)
        magnitude = np.abs(g_l) + e_l + np.abs(g_s) + e_s + asked
        centred_error = np.where(p > 0, self.log_p_error + self.entropy_error, 0.0)
        error = self.p_error * magnitude + p * (
            np.where(g_h == 0, 0, np.abs(g_h) * centred_error) + 4 * u * magnitude
        )
        error = error + p * (e_l + e_s) + np.where(e_h == 0, 0, p * np.abs(centred) * e_h)
        error[chosen] += e_l[:, 0] + 2 * u * np.abs(g_l[:, 0])
        idle = np.broadcast_to((g_l == 0) & (g_h == 0) & (g_s == 0), value.shape)
        idle = idle & (e_l == 0) & (e_h == 0) & (e_s == 0)
        value = np.where(banned & ~np.isnan(self.p), 0.0, value)
        error = np.where(banned | idle, 0.0, error)
        # unspecified: what a row without distribution gets where nothing is asked of it, and what a
        # banned column gets where NaN is asked of the row
        unspecified = idle & self.undefined[:, None] | (p == 0) & np.isnan(g_l + g_h + g_s)
        unspecified = unspecified | np.isinf(e_l + e_h + e_s)
        unspecified = unspecified | np.isinf(g_l + g_h + g_s) | banned & self.undefined[:, None]
        result = value * self.slope
        total = np.abs(self.slope) * error + (np.abs(value) + error) * self.slope_error
        total = total + 2 * u * np.abs(result)
        total = np.where(
            error == 0, np.where(value == 0, 0.0, total), total + self.arithmetic.smallest
        )
        largest = self.arithmetic.largest
        beyond = np.abs(result) + total > largest
        # on the way: a product of what is asked for and dz/dx, before p makes it small
        beyond = beyond | (magnitude * np.abs(self.slope) > largest) & ~np.isinf(magnitude)
        total = np.where((beyond & ~idle) | np.isnan(total), np.inf, total)
        total = np.where(np.isfinite(result), total, np.where(self.overflows[:, None], np.inf, 0.0))
        total = np.where(self.overflows[:, None] & ~idle | unspecified, np.inf, total)
        return Bounded(result, total, self.arithmetic)
