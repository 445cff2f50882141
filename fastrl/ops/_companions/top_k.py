"""Rows of logits, compared with a teacher that gives log-probabilities of K tokens.

The comparison is between two small rows: the logits of the K tokens and, with a tail, the
log-sum-exp of all other logits as one more event. The tail is summed directly, because 1 minus the
rest would lose it, and its gradient is shared among the other tokens by their own softmax, which
does not underflow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.checks import can_read
from fastrl.contract import RowArguments, RowStats, SoftmaxStats
from fastrl.ops._arguments import NO_TEACHER, TeacherArguments
from fastrl.ops._companions.pair import Compared, Pair, Upstream, pair_of
from fastrl.ops._head.projection import gradient_of
from fastrl.ops._lens.rows import Rows, Slopes, slopes_at
from fastrl.ops._process_groups import total
from fastrl.ops._vocabulary_parts.parts import VocabularyParts


class Events(NamedTuple):
    """The student's events: the K tokens `[1, C, K]`, and the tail `[1, C]`."""

    logits: Tensor  # of the K tokens
    exponents: Tensor  # z of the K tokens
    tail: Tensor | None  # log-sum-exp of z of all other tokens
    others: RowStats | None  # the statistics of a row of these alone


class TopKRows:
    """Rows `[1, C]` of logits, in memory that may be written, and of a teacher's K tokens."""

    def __init__(
        self,
        rows: Rows,
        logits: Tensor,
        token_ids: Tensor,
        teacher: TeacherArguments,
        parts: VocabularyParts,
    ) -> None:
        """Compare logits `[1, C, V]`; `teacher` has ids and log-probabilities of these rows.

        `token_ids` `[1, C]` are ids in the whole vocabulary.
        """
        assert teacher.token_ids is not None
        assert teacher.logprobs is not None
        self._rows, self._logits, self._token_ids = rows, logits, token_ids
        self._teacher_ids, self._logprobs = teacher.token_ids[None], teacher.logprobs[None]
        self._beta, self._split = teacher.beta, rows.part is not None
        start, size = (parts.start() if self._split else 0), logits.shape[-1]
        self._has_tail = teacher.has_tail and self._teacher_ids.shape[-1] < parts.total(size)
        ids = self._teacher_ids - start
        self._own = (ids >= 0) & (ids < size)
        self._ids = torch.where(self._own, ids, 0)
        self._events = self._read()

    def _read(self) -> Events:
        x = self._logits.gather(-1, self._ids)
        if self._rows.part is None:  # on a GPU the ids have not been checked
            held = torch.where(self._own, x, float("nan"))
        else:
            held = total(torch.where(self._own, x, 0.0), self._rows.part.group)
        exponents = self._rows.exponents(held)
        if not self._has_tail:
            return Events(held, exponents, None, None)
        # only the other tokens are still needed
        self._put(self._logits, torch.full_like(x, float("-inf")))
        stats = self._rows.stats(self._logits)
        return Events(held, exponents, stats.logsumexp, stats)

    def compare(self, stats: SoftmaxStats) -> Compared:
        """Return the comparison with a student of these statistics."""
        pair = self._pair()
        compared = pair.compare(pair.student_stats().of_softmax())
        # this counts tokens, while the comparison is over events
        top = self._logprobs == self._logprobs.amax(-1, keepdim=True)
        exponents = self._rows.exponents
        largest = exponents(self._events.logits) >= exponents(stats.row_max[..., None])
        agrees = (top & largest).any(-1) & self._rows.active
        return compared._replace(stats=compared.stats._replace(agrees=agrees))

    def write_gradient(self, upstream: Upstream, *, narrow: bool = False) -> None:
        """Overwrite the logits with dL/dlogits."""
        stats, slopes = upstream.stats, upstream.slopes
        pair = self._pair()
        of_student = pair.student_stats().of_softmax()
        of_events = pair.gradient(upstream._replace(stats=of_student, slopes=(None, None, None)))
        values, tail = of_events[..., : self._ids.shape[-1]], self._events.tail
        rows = self._rows
        if tail is not None:
            assert self._events.others is not None
            every = torch.cat([self._events.exponents, tail[..., None]], -1)
            logsumexp = every.logsumexp(-1)
            log_q = self._events.exponents - logsumexp[..., None]
            values = slopes_at(log_q, self._is_token(), stats.entropy, slopes) + values
            slopes = self._of_others(of_events[..., -1], tail - logsumexp, stats.entropy, slopes)
            stats = self._events.others.of_softmax()
            rows = rows.among(rows.active & (tail != float("-inf")))  # else there is no softmax
        values = values * self._rows.exponent_slopes(self._events.logits.to(values.dtype))
        target = gradient_of(self._logits[0], narrow=narrow)[None]
        if all(slope is None for slope in slopes):
            target.zero_()
        else:
            rows.write_gradient(self._logits, stats, slopes, narrow=narrow)
        if tail is None:
            values = values + target.gather(-1, self._ids).to(values.dtype)
        values = torch.where(self._rows.active[..., None], values, 0.0)
        self._put(target, values.to(target.dtype))

    def _of_others(
        self, of_tail: Tensor, log_share: Tensor, entropy: Tensor, slopes: Slopes
    ) -> Slopes:
        """Return the slopes for the other tokens' own row that have the same effect.

        With the others' softmax s and their share of the probability, q_j = share * s_j.
        """
        assert self._events.others is not None
        of_logprob, of_entropy, of_logsumexp = slopes
        share = log_share.exp()
        result = of_tail if of_logsumexp is None else of_tail + share * of_logsumexp
        if of_logprob is not None:
            is_other = ~self._is_token().any(-1)
            result = result + of_logprob * torch.where(is_other, -log_share.expm1(), -share)
            of_logprob = torch.where(is_other, of_logprob, 0.0)
        if of_entropy is not None:
            of_entropy = share * of_entropy
            result = result - of_entropy * (log_share + (entropy - self._events.others.entropy))
        return of_logprob, of_entropy, result

    def _is_token(self) -> Tensor:
        """Return which of the teacher's tokens are the rows' own."""
        return self._teacher_ids == self._token_ids[..., None]

    def _pair(self) -> Pair:
        logprobs, exponents, tail = self._logprobs, self._events.exponents, self._events.tail
        if tail is not None:
            others = 1 - logprobs.double().exp().sum(-1, keepdim=True)
            # NaN stays; a mass of 1 may be rounded, and a tail of 0 would be no event
            least = torch.finfo(logprobs.dtype).eps
            others = torch.where(others < least, least, others)
            logprobs = torch.cat([logprobs.double(), others.log()], -1)
            exponents = torch.cat([exponents, tail[..., None]], -1)
        as_they_are, active = NO_TEACHER.scaling, self._rows.active
        ids = torch.zeros_like(self._rows.arguments.token_ids)
        events = RowArguments(ids, active, -1, *as_they_are)
        rows = Rows(events, self._rows.backend, None)
        logprobs = logprobs.to(exponents.dtype).contiguous()
        return pair_of(rows, exponents.contiguous(), logprobs, as_they_are, self._beta)

    def _put(self, target: Tensor, values: Tensor) -> None:
        """Write values to the columns of the K tokens that belong to this rank."""
        if not self._split:
            target.scatter_(-1, self._ids, values)
            return
        first, row, k = self._own.nonzero(as_tuple=True)
        target[first, row, self._ids[first, row, k]] = values[first, row, k]


def check_tokens(teacher: TeacherArguments, active: Tensor, vocabulary: int) -> None:
    """Raise on a CPU if an active row `[N]` has invalid top-k values."""
    ids, given = teacher.token_ids, teacher.logprobs
    if ids is None or given is None or not (can_read(ids) and can_read(active)):
        return
    ids, logprobs = ids[active], given[active].double()
    outside = (ids < 0) | (ids >= vocabulary)
    if bool(outside.any()):
        raise ValueError(
            f"teacher.token_ids must lie in [0, {vocabulary}), got {int(ids[outside][0])}"
        )
    ordered = ids.sort(-1).values
    repeated = ordered[:, 1:] == ordered[:, :-1]
    if bool(repeated.any()):
        token = int(ordered[:, 1:][repeated][0])
        raise ValueError(f"teacher.token_ids must not repeat an id in a row, got {token} twice")
    # logarithms are rounded: in bfloat16 the mass may be some percent above 1
    most = logprobs.exp().sum(-1)
    limit = 1 + max(1e-3, 16 * torch.finfo(given.dtype).eps)
    if bool((most > limit).any()):
        raise ValueError(
            "teacher.logprobs must be log-probabilities, which sum to at most 1, "
            f"got {float(most.max()):.6g}"
        )
