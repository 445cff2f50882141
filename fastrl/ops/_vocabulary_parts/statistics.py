"""Statistics of rows whose vocabulary is split: ranks exchange and combine their shares.

A rank runs the same kernels on its part as on a whole row, with ids of its own columns, and
`reference.whole_stats` combines the results. The backward kernels take the statistics of the whole
row, and exponents relative to its maximum, so only the slopes differ: with y the token,
dL/dz_j = g ([j = y] - p_j) is -g p_j on the ranks that do not have y, which is the gradient of the
log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import RowArguments, RowStats
from fastrl.library import called, operators
from fastrl.ops._process_groups import start_gather
from fastrl.ops._vocabulary_parts.parts import VocabularyParts

Slopes = tuple[Tensor | None, Tensor | None, Tensor | None]


class PartRows(NamedTuple):
    """Rows `[B, T]` of a part of the vocabulary."""

    rows: RowArguments  # ids of this part's columns; 0 where the token belongs to another part
    own: Tensor  # bool: the token belongs to this part
    known: Tensor  # bool: the token belongs to some part

    @classmethod
    def of(cls, rows: RowArguments, active: Tensor, parts: VocabularyParts) -> PartRows:
        """Return the rows of this rank's part."""
        start, size = parts.start(), parts.sizes[parts.rank]
        ids = rows.token_ids
        own = (ids >= start) & (ids < start + size)
        known = (ids >= 0) & (ids < sum(parts.sizes))
        # ids now count from the start of this part, so one may equal ignore_index
        local = rows._replace(
            token_ids=torch.where(own, ids - start, 0), mask=active, ignore_index=-1
        )
        return cls(local, own, known)

    def active(self) -> Tensor:
        """Return which rows are active."""
        assert self.rows.mask is not None
        return self.rows.mask

    def flat(self) -> PartRows:
        """Reshape rows `[B, T]` to `[N]`."""
        rows, active = self.rows, self.active().reshape(-1)
        temperatures = None if rows.temperatures is None else rows.temperatures.reshape(-1)
        ids = rows.token_ids.reshape(-1)
        flat = rows._replace(token_ids=ids, mask=active, temperatures=temperatures)
        return PartRows(flat, self.own.reshape(-1), self.known.reshape(-1))

    def taken(self, index: slice | Tensor) -> PartRows:
        """Index rows `[N]`."""
        rows = self.rows
        local = rows._replace(
            token_ids=rows.token_ids[index],
            mask=self.active()[index],
            temperatures=None if rows.temperatures is None else rows.temperatures[index],
        )
        return PartRows(local, self.own[index], self.known[index])

    def at(self, place: Tensor) -> PartRows:
        """Return the rows with their tokens at other columns."""
        ids = torch.where(self.own, place, 0)
        return self._replace(rows=self.rows._replace(token_ids=ids))

    def slopes(self, slopes: Sequence[Tensor | None]) -> Slopes:
        """Return the slopes of logprob, entropy and logsumexp that this part's kernels take."""
        of_logprob, of_entropy, of_logsumexp = slopes
        if of_logprob is None:
            return None, of_entropy, of_logsumexp
        undefined = ~self.known & (of_logprob != 0)
        of_logprob = torch.where(undefined, float("nan"), of_logprob)
        others = torch.where(self.own, 0.0, -of_logprob)
        return (
            torch.where(self.own, of_logprob, 0.0),
            of_entropy,
            others if of_logsumexp is None else others + of_logsumexp,
        )


def part_stats(
    logits: Tensor,
    part: PartRows,
    backend: str,
    *,
    with_entropy: bool = True,
    with_sum_sq_probs: bool = True,
) -> Tensor:
    """Return the fields of `PartStats` for the logits `[B, T, V]` of a part, stacked."""
    rows, active = part.rows, part.active()
    if backend == "reference":
        return torch.stack(reference.part_stats(logits, active, part.own, rows))
    stats = RowStats._make(
        called(operators(backend).token_stats_fwd, logits, *rows, with_entropy, with_sum_sq_probs)
    )
    token_logit = logits.gather(-1, rows.token_ids[..., None])[..., 0].to(stats.log_sum.dtype)
    empty = stats.logsumexp == float("-inf")  # all logits are -inf: it adds nothing
    return torch.stack(
        reference.PartStats(
            row_max=torch.where(empty, float("-inf"), stats.row_max),
            log_sum=stats.log_sum,
            entropy=stats.entropy,
            sum_sq_probs=torch.where(empty, 0.0, stats.sum_sq_probs),
            token_logit=torch.where(part.own & active, token_logit, 0.0),
        )
    )


def write_part_gradient(
    logits: Tensor,
    part: PartRows,
    stats: RowStats,
    slopes: Sequence[Tensor | None],
    backend: str,
    *,
    narrow: bool = False,
) -> None:
    """Overwrite the logits `[B, T, V]` of a part with dL/dlogits.

    `stats` belong to the whole rows; `slopes` are of logprob, entropy and logsumexp, `[B, T]`.
    """
    of_part = part.slopes(slopes)
    if backend == "reference":
        reference.token_gradient(
            logits, part.rows, part.active(), stats, of_part, is_part=True, overwrite=True
        )
        return
    operators(backend).token_stats_bwd_(logits, *gradient_arguments(part, stats, of_part), narrow)


def gradient_arguments(part: PartRows, stats: RowStats, slopes: Slopes) -> tuple[object, ...]:
    """Return the arguments of `token_stats_bwd` besides the logits."""
    of_part = (None if slope is None else slope.contiguous() for slope in slopes)
    return (*part.rows, stats.row_max, stats.log_sum, stats.entropy, *of_part)


class Exchange:
    """The statistics of a part on their way to the other ranks."""

    def __init__(self, stats: Tensor, parts: VocabularyParts) -> None:
        """Start to send `stats` from `part_stats`."""
        self._own = stats  # kept until it is sent
        self._gathered, self._work = start_gather(stats, parts.process_group())

    def result(self, part: PartRows) -> RowStats:
        """Wait for the other ranks; return the statistics of the whole rows."""
        self._work.wait()
        return combined(self._gathered, part)


def combined(gathered: Tensor, part: PartRows) -> RowStats:
    """Return the statistics of whole rows from the statistics of all parts, `[R, fields, B, T]`."""
    fields = reference.PartStats._make(gathered.unbind(1))
    return reference.whole_stats(fields, part.rows, part.active(), part.known)
