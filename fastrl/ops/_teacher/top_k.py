"""Rows of logits, compared with a teacher that gives log-probabilities of K tokens.

The comparison is between two small rows: the logits of the K tokens and, with a tail, the
log-sum-exp of all other logits as one more event. The tail is summed directly, because 1 minus the
rest would lose it, and its gradient is shared among the other tokens by their own softmax, which
does not underflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import RowArguments, RowStats, TeacherScaling
from fastrl.ops._linear.chunks import (
    as_batch,
    chunk_stats,
    gradient_of,
    in_batch,
    write_chunk_gradient,
)
from fastrl.ops._process_groups import gathered, total
from fastrl.ops._teacher.arguments import TeacherArguments
from fastrl.ops._teacher.rows import Pair, TeacherStats, pair_of
from fastrl.ops._vocabulary_parts.parts import WHOLE, VocabularyParts
from fastrl.ops._vocabulary_parts.statistics import PartRows, combined, part_stats

_AS_THEY_ARE = TeacherScaling(None, 1.0, 1.0, 0.0)


class Events(NamedTuple):
    """The student's events: the K tokens `[C, K]`, and the tail `[C]`."""

    logits: Tensor  # of the K tokens
    exponents: Tensor  # z of the K tokens
    tail: Tensor | None  # log-sum-exp of z of all other tokens
    others: RowStats | None  # the statistics of a row of these alone


class TopKRows:
    """Rows `[C]` of logits `[C, V]`, in memory that may be written, and of a teacher's K tokens."""

    def __init__(
        self,
        logits: Tensor,
        rows: RowArguments,
        teacher: TeacherArguments,
        backend: str,
        part: PartRows | None,
        parts: VocabularyParts,
    ) -> None:
        """Take the ids and log-probabilities of `teacher` for these rows; `part` has rows `[C]`."""
        assert teacher.teacher_ids is not None
        assert teacher.teacher_logprobs is not None
        self._logits, self._rows, self._backend = logits, rows, backend
        self._part, self._parts = part, parts
        self._teacher = teacher._replace(scaling=_AS_THEY_ARE)
        start, size = (parts.start() if part is not None else 0), logits.shape[1]
        whole = size if part is None else sum(parts.sizes)
        self._has_tail = teacher.has_tail and teacher.teacher_ids.shape[1] < whole
        ids = teacher.teacher_ids - start
        self._own = (ids >= 0) & (ids < size)
        self._ids = torch.where(self._own, ids, 0)
        self._token = rows.token_ids if part is None else part.rows.token_ids
        self._has_token = torch.ones_like(self._token).bool() if part is None else part.own
        self._events = self._read()

    def _read(self) -> Events:
        x = self._logits.gather(1, self._ids)
        if self._part is None:  # on a GPU the ids have not been checked
            held = torch.where(self._own, x, float("nan"))
        else:
            held = total(torch.where(self._own, x, 0.0), self._parts.process_group())
        exponents = self._scaled(held)
        if not self._has_tail:
            return Events(held, exponents, None, None)
        self._leave_out_tokens()
        if self._part is None:
            stats = chunk_stats(self._logits, self._rows, self._backend)
        else:
            batch = in_batch(self._part)
            local = part_stats(self._logits[None], batch, self._backend)
            whole = combined(gathered(local, self._parts.process_group()), batch)
            stats = RowStats._make(stat[0] for stat in whole)
        self._put(self._logits, x)
        return Events(held, exponents, stats.logsumexp, stats)

    def compare(self, stats: RowStats) -> TeacherStats:
        """Return the comparison, `[C]` each, with a student of these statistics."""
        pair, logprobs = self._pair(), self._teacher.teacher_logprobs
        assert logprobs is not None
        compared = pair.compare(pair.student_stats()).indexed(0)
        # this counts tokens, while the comparison is over events
        row_max = stats.row_max
        if self._backend == "reference" and self._part is None:
            row_max = self._logits.amax(1).to(row_max.dtype)
        top = logprobs == logprobs.amax(1, keepdim=True)
        largest = self._scaled(self._events.logits) >= self._scaled(row_max[:, None])
        return compared._replace(agrees=(top & largest).any(1) & self._active())

    def write_gradient(
        self,
        stats: RowStats,
        compared: TeacherStats,
        grad_divergence: Tensor,
        slopes: Sequence[Tensor | None],
        *,
        narrow: bool,
    ) -> None:
        """Overwrite the logits with dL/dlogits; `slopes` are of logprob, entropy and logsumexp."""
        pair = self._pair()
        of_events = pair.gradient(
            pair.student_stats(),
            TeacherStats._make(x[None] for x in compared),
            grad_divergence[None],
            (None, None, None),
        )[0]
        values, tail = of_events[:, : self._ids.shape[1]], self._events.tail
        rows, part = self._rows, self._part
        if tail is not None:
            assert self._events.others is not None
            every = torch.cat([self._events.exponents, tail[:, None]], 1)
            logsumexp = every.logsumexp(1)
            log_q = self._events.exponents - logsumexp[:, None]
            values = self._policy(log_q, stats.entropy, slopes) + values
            entropy, stats = stats.entropy, self._events.others
            slopes = self._of_others(of_events[:, -1], tail - logsumexp, entropy, slopes)
            self._leave_out_tokens()
            some = self._active() & (tail != float("-inf"))  # else there is no softmax
            rows = rows._replace(mask=some)
            if part is not None:
                part = part._replace(rows=part.rows._replace(mask=some))
        values = values * self._derivative()
        if all(slope is None for slope in slopes):
            self._logits.zero_()
        else:
            write_chunk_gradient(
                self._logits, rows, stats, slopes, self._backend, narrow=narrow, part=part
            )
        target = gradient_of(self._logits, narrow=narrow)
        if tail is None:
            values = values + target.gather(1, self._ids).to(values.dtype)
        values = torch.where(self._active()[:, None], values, 0.0)
        self._put(target, values.to(target.dtype))

    def _of_others(
        self, of_tail: Tensor, log_share: Tensor, entropy: Tensor, slopes: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return the slopes for the other tokens' own row that have the same effect.

        With the others' softmax s and their share of the probability, q_j = share * s_j.
        """
        assert self._events.others is not None
        assert self._teacher.teacher_ids is not None
        of_logprob, of_entropy, of_logsumexp = slopes
        share = log_share.exp()
        result = of_tail if of_logsumexp is None else of_tail + share * of_logsumexp
        if of_logprob is not None:
            chosen = self._teacher.teacher_ids == self._rows.token_ids[:, None]
            is_other = ~chosen.any(1)
            result = result + of_logprob * torch.where(is_other, -log_share.expm1(), -share)
            of_logprob = torch.where(is_other, of_logprob, 0.0)
        if of_entropy is not None:
            of_entropy = share * of_entropy
            result = result - of_entropy * (log_share + (entropy - self._events.others.entropy))
        return of_logprob, of_entropy, result

    def _policy(self, log_q: Tensor, entropy: Tensor, slopes: Sequence[Tensor | None]) -> Tensor:
        """Return dL/dz of the K tokens through the student's statistics."""
        of_logprob, of_entropy, of_logsumexp = (
            0.0 if slope is None else slope[:, None] for slope in slopes
        )
        q = log_q.exp()
        finite = torch.where(q == 0, 0.0, log_q)
        is_token = (self._ids == self._token[:, None]) & self._has_token[:, None] & self._own
        result = torch.where(is_token, -log_q.expm1(), -q) * of_logprob
        return result + of_logsumexp * q - of_entropy * q * (finite + entropy[:, None])

    def _pair(self) -> Pair:
        logprobs = self._teacher.teacher_logprobs
        assert logprobs is not None
        exponents, tail = self._events.exponents, self._events.tail
        if tail is not None:
            others = 1 - logprobs.double().exp().sum(1, keepdim=True)
            # NaN stays; a mass of 1 may be rounded, and a tail of 0 would be no event
            least = torch.finfo(logprobs.dtype).eps
            others = torch.where(others < least, least, others)
            logprobs = torch.cat([logprobs.double(), others.log()], 1)
            exponents = torch.cat([exponents, tail[:, None]], 1)
        logprobs = logprobs.to(exponents.dtype)
        rows = self._rows._replace(
            token_ids=torch.zeros_like(self._rows.token_ids),
            mask=self._active(),
            ignore_index=-1,
            temperatures=None,
            temperature=1.0,
            logit_scale=1.0,
            logit_softcap=0.0,
        )
        return pair_of(
            exponents[None].contiguous(),
            logprobs[None].contiguous(),
            as_batch(rows),
            self._teacher,
            self._backend,
            None,
            WHOLE,
        )

    def _active(self) -> Tensor:
        active = self._rows.token_ids != self._rows.ignore_index
        return active if self._rows.mask is None else active & self._rows.mask

    def _temperature(self) -> Tensor | float:
        rows = self._rows
        if rows.temperatures is None:
            return rows.temperature
        return torch.where(self._active(), rows.temperatures, 1.0)[:, None]

    def _scaled(self, logits: Tensor) -> Tensor:
        real = torch.float64 if logits.dtype == torch.float64 else torch.float32
        rows = self._rows
        z = reference.squashed(logits.to(real), rows)
        return z * (1.0 if rows.logit_softcap else rows.logit_scale) / self._temperature()

    def _derivative(self) -> Tensor | float:
        """Return dz/dlogits of the K tokens."""
        rows, raw_gain = self._rows, self._rows.logit_scale / self._temperature()
        if not rows.logit_softcap:
            return raw_gain
        x = self._events.logits.to(self._events.exponents.dtype)
        return raw_gain * reference.squash_slope(x, rows)

    def _leave_out_tokens(self) -> None:
        """Exclude the K tokens from the rows."""
        lowest = torch.full_like(self._ids, float("-inf"), dtype=self._logits.dtype)
        self._put(self._logits, lowest)

    def _put(self, target: Tensor, values: Tensor) -> None:
        """Write values to the columns of the K tokens that belong to this rank."""
        if self._part is None:
            target.scatter_(1, self._ids, values)
            return
        row, k = self._own.nonzero(as_tuple=True)
        target[row, self._ids[row, k]] = values[row, k]
