"""The divergence from a teacher that is known by log-probabilities of K tokens, in float64.

The rows of both are those of K + 1 events, or of K without a tail. The student's z of the tail is
the log-sum-exp of all other tokens, which share its gradient by their softmax.
"""

import dataclasses

import numpy as np

from .bounded import FORMATS, Bounded, Decision
from .divergence import Divergence
from .rows import Head, Rows


@dataclasses.dataclass(frozen=True)
class TopTokens:
    """Active rows of a student beside the tokens `ids` `[N, K]` of a teacher."""

    student: Rows
    head: Head
    ids: np.ndarray
    logprobs: np.ndarray
    dtype: str  # of the log-probabilities
    has_tail: bool
    beta: float
    x_error: object = 0.0

    def __post_init__(self) -> None:
        s, keep = self.student, object.__setattr__
        row = np.arange(s.n)[:, None]
        excluded = np.zeros(s.x.shape, bool)
        excluded[row, self.ids] = True
        keep(self, "tail", self.has_tail and self.ids.shape[1] < s.vocabulary)
        x_error = np.broadcast_to(self.x_error, s.x.shape)
        x = np.where(excluded, -np.inf, s.x)
        others = Rows(x, s.ids, self.head, s.arithmetic, np.where(excluded, 0.0, x_error))
        keep(self, "others", others)
        z, error = s.z[row, self.ids], s.z_error[row, self.ids]
        log_p = self.logprobs
        log_error = np.zeros_like(log_p)
        if self.tail:
            lse = others.logsumexp
            z = np.concatenate([z, lse.value[:, None]], 1)
            error = np.concatenate([error, lse.error[:, None]], 1)
            terms = np.exp(log_p)
            left = 1 - terms.sum(1, keepdims=True)
            least = {"float64": 2.0**-52}.get(self.dtype, 2 * FORMATS[self.dtype].unit)
            rounding = 2.0**-50 * (terms.sum(1, keepdims=True) + 1)
            left = np.where(left < least, least, left)
            log_p = np.concatenate([log_p, np.log(left)], 1)
            log_error = np.concatenate([log_error, rounding / left], 1)
        u = s.arithmetic.unit
        finite = np.where(np.isfinite(z), np.abs(z), 0.0)
        error = np.where(np.isfinite(z), error + 2 * u * finite, 0.0)
        error = np.where(s.overflows[:, None], np.inf, error)
        # z itself may overflow to -inf, which gets no gradient
        keep(self, "overflows", s.overflows | (2 * finite > s.arithmetic.largest).any(1))
        log_error = log_error + u * np.abs(np.where(np.isfinite(log_p), log_p, 0.0))
        plain, first = Head(np.ones(s.n)), np.zeros(s.n, int)
        events = [
            Rows(values, first, plain, s.arithmetic, errors)
            for values, errors in ((z, error), (log_p, log_error))
        ]
        keep(self, "events", Divergence(*events, self.beta))
        keep(self, "excluded", excluded)

    def divergence(self) -> Bounded:
        """Return the divergences `[N]`."""
        return self.events.divergence()

    def agrees(self) -> Decision:
        """Return whether a token that is the teacher's most likely is the student's."""
        s, row = self.student, np.arange(self.student.n)[:, None]
        known = self.logprobs == self.logprobs.max(1, keepdims=True)
        top = s.z.max(1, keepdims=True)
        of_top = np.where(s.z == top, s.z_error, 0.0).max(1, keepdims=True)
        largest = (s.x == s.x.max(1, keepdims=True))[row, self.ids]
        maybe = (s.z + s.z_error >= top - of_top)[row, self.ids]
        yes = (known & largest).any(1)
        return Decision(yes, (known & maybe).any(1) & ~yes | self.events.undefined)

    def gradient(self, upstream: np.ndarray) -> Bounded:
        """Return dL/dx of the student for dL/ddivergence `[N]`."""
        s, count = self.student, self.ids.shape[1]
        of_events = self.events.gradient(upstream)
        row = np.arange(s.n)[:, None]
        value, error = np.zeros(s.x.shape), np.zeros(s.x.shape)
        if self.tail:
            tail, tail_error = of_events.value[:, count:], of_events.error[:, count:]
            p, p_error = self.others.p, self.others.p_error
            empty = np.isneginf(self.others.top)  # excluded by the student as a whole
            p, p_error = (np.where(empty, 0.0, x) for x in (p, p_error))
            with np.errstate(invalid="ignore"):
                value = np.where(empty, 0.0, tail * p)
                error = np.abs(tail) * p_error + tail_error * (p + p_error)
            error = np.where(empty, 0.0, np.where(np.isnan(error), np.inf, error))
        value[row, self.ids] = of_events.value[:, :count]
        error[row, self.ids] = of_events.error[:, :count]
        u = s.arithmetic
        undefined = self.events.undefined[:, None]
        error = np.where(undefined, np.inf, error)
        banned = np.isneginf(s.z) & ~undefined
        value, error = np.where(banned, 0.0, value), np.where(banned, 0.0, error)
        with np.errstate(invalid="ignore"):
            result = value * s.slope
            total = np.abs(s.slope) * error + (np.abs(value) + error) * s.slope_error
        total = total + 4 * u.unit * np.abs(result) + u.smallest * (result != 0)
        total = np.where(np.isinf(error) | np.isnan(total), np.inf, total)
        beyond = (np.abs(result) + total > u.largest) | self.overflows[:, None]
        idle = (upstream == 0)[:, None]
        return Bounded(result, np.where(beyond & ~idle, np.inf, total), u)
