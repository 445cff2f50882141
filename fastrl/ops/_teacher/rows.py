"""Rows of logits `[B, T, V]`, compared with a teacher's rows on any backend.

If the vocabulary is split, each rank computes the sums over its part, and the ranks add them up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import RowArguments, RowStats
from fastrl.library import arithmetic_dtype, called, operators
from fastrl.ops._process_groups import gathered, total
from fastrl.ops._teacher.arguments import TeacherArguments
from fastrl.ops._vocabulary_parts.parts import VocabularyParts
from fastrl.ops._vocabulary_parts.statistics import PartRows, Slopes, combined, part_stats


class TeacherStats(NamedTuple):
    """The results of a comparison per row; 0 in inactive rows."""

    divergence: Tensor
    teacher_entropy: Tensor
    agrees: Tensor  # bool: the same token is the most probable
    slope_mean: Tensor  # this and the following are for the backward
    row_max: Tensor
    log_sum: Tensor

    def public(self) -> tuple[Tensor, ...]:
        """Return the fields of `TokenStats`, in their order."""
        return self[:3]

    def without_gradient(self) -> tuple[Tensor, ...]:
        """Return the fields that are not differentiable."""
        return self[1:3]

    def saved(self) -> tuple[Tensor, ...]:
        """Return the tensors that the backward needs."""
        return self[3:]

    def indexed(self, index: Any) -> TeacherStats:
        """Index or reshape all fields."""
        return TeacherStats._make(x[index] for x in self)


def pair_of(
    logits: Tensor,
    teacher_logits: Tensor,
    rows: RowArguments,
    teacher: TeacherArguments,
    backend: str,
    part: PartRows | None,
    parts: VocabularyParts,
) -> Pair:
    """Return the pair of student and teacher rows; `part` is set if the vocabulary is split."""
    given = teacher_logits
    # float64 exactly where the student's logits are
    if torch.float64 in (given.dtype, logits.dtype) and given.dtype != logits.dtype:
        given = given.to(arithmetic_dtype(logits, logits))
    given = given if given.stride(-1) == 1 or given.shape[-1] == 1 else given.contiguous()
    kind = ReferencePair if backend == "reference" else Pair
    return kind(logits, given, rows, teacher, backend, part, parts)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Rows of a student and of its teacher, for the kernels."""

    logits: Tensor
    teacher_logits: Tensor
    rows: RowArguments
    teacher: TeacherArguments
    backend: str
    part: PartRows | None
    parts: VocabularyParts

    def student_stats(self) -> RowStats:
        """Return the student's statistics."""
        return self._stats(self.logits, self.rows, self.part)

    def compare(self, stats: RowStats) -> TeacherStats:
        """Return the comparison with a student of these statistics of the whole rows."""
        part, of_teacher = self.part, self._teacher_stats(self.part)
        sums = self._operators().divergence_fwd(
            self.logits,
            self.teacher_logits,
            *(self.rows if part is None else part.rows),
            *self.teacher.scaling,
            stats.row_max,
            stats.log_sum,
            of_teacher.row_max,
            of_teacher.log_sum,
            self.teacher.beta,
        )
        return self._compared(sums, of_teacher)

    def gradient(
        self,
        stats: RowStats,
        compared: TeacherStats,
        grad_divergence: Tensor,
        slopes: Sequence[Tensor | None],
    ) -> Tensor:
        """Return dL/dlogits; `slopes` are of logprob, entropy and logsumexp, `[B, T]`."""
        arguments = self._backward(stats, compared, grad_divergence, slopes)
        return cast("Tensor", self._operators().divergence_bwd(*arguments))

    def write_gradient(
        self,
        stats: RowStats,
        compared: TeacherStats,
        grad_divergence: Tensor,
        slopes: Sequence[Tensor | None],
        *,
        narrow: bool = False,
    ) -> None:
        """Overwrite the logits with dL/dlogits."""
        arguments = self._backward(stats, compared, grad_divergence, slopes)
        self._operators().divergence_bwd_(*arguments, narrow)

    def _stats(self, logits: Tensor, rows: RowArguments, part: PartRows | None) -> RowStats:
        if part is None:
            run = operators(self.backend)
            return RowStats._make(called(run.token_stats_fwd, logits, *rows, True, True))
        local = part_stats(logits, part, self.backend)
        group = self.parts.process_group() if self.part is not None else None
        return combined(gathered(local, group), part)

    def _teacher_stats(self, part: PartRows | None) -> RowStats:
        """Return the teacher's statistics; `part` has the student's rows."""
        of_part = None if part is None else part._replace(rows=self.teacher.rows(part.rows))
        return self._stats(self.teacher_logits, self.teacher.rows(self.rows), of_part)

    def _compared(self, sums: Sequence[Tensor], of_teacher: RowStats) -> TeacherStats:
        """Return the comparison from its sums over whole rows, or over this rank's part of them."""
        divergence, slope_mean, agrees = sums
        if self.part is not None:
            stacked = torch.stack([divergence, slope_mean, agrees.to(divergence.dtype)])
            divergence, slope_mean, found = total(stacked, self.parts.process_group()).unbind()
            agrees = found > 0
        return TeacherStats(
            divergence.clamp(min=0),
            of_teacher.entropy,
            agrees,
            slope_mean,
            of_teacher.row_max,
            of_teacher.log_sum,
        )

    def _backward(
        self,
        stats: RowStats,
        compared: TeacherStats,
        grad_divergence: Tensor,
        slopes: Sequence[Tensor | None],
    ) -> tuple[object, ...]:
        part = self.part
        of_part: Sequence[Tensor | None] = slopes if part is None else part.slopes(slopes)
        return (
            self.logits,
            self.teacher_logits,
            *(self.rows if part is None else part.rows),
            *self.teacher.scaling,
            stats.row_max,
            stats.log_sum,
            stats.entropy,
            *(None if slope is None else slope.contiguous() for slope in of_part),
            compared.row_max,
            compared.log_sum,
            self.teacher.beta,
            compared.slope_mean,
            _finite(grad_divergence, compared.slope_mean).contiguous(),
        )

    def _operators(self) -> Any:
        """Return the operators of this backend; CUDA uses Triton's or the CPU's."""
        if self.backend != "cuda":
            return operators(self.backend)
        return operators("triton" if self.logits.is_cuda else "cpu")


def _finite(grad_divergence: Tensor, slope_mean: Tensor) -> Tensor:
    """Return the upstream gradients, 0 for a row whose gradient would be infinite."""
    return torch.where(slope_mean.isinf(), 0.0, grad_divergence)


class ReferencePair(Pair):
    """A `Pair` in float64, which recomputes the statistics of whole rows in float64."""

    def student_stats(self) -> RowStats:
        """Return the student's statistics."""
        return self._rounded(self._double(self.logits, self._as_part()))

    def compare(self, stats: RowStats) -> TeacherStats:
        """Return the comparison with a student of these statistics of the whole rows."""
        sums, _, of_teacher = self._sums(stats)
        real = arithmetic_dtype(self.logits, self.logits)
        rounded = (x if x.dtype == torch.bool else x.to(real) for x in sums)
        return self._compared(list(rounded), self._rounded(of_teacher))

    def gradient(
        self,
        stats: RowStats,
        compared: TeacherStats,
        grad_divergence: Tensor,
        slopes: Sequence[Tensor | None],
    ) -> Tensor:
        """Return dL/dlogits; `slopes` are of logprob, entropy and logsumexp, `[B, T]`."""
        part, slope_mean = self._as_part(), compared.slope_mean
        grad_divergence = _finite(grad_divergence, slope_mean)
        if self.part is None:
            (_, slope_mean, _), stats, of_teacher = self._sums(stats)
        else:
            unused = torch.empty_like(compared.row_max)
            of_teacher = RowStats._make([unused] * len(RowStats._fields))
            of_teacher = of_teacher._replace(row_max=compared.row_max, log_sum=compared.log_sum)
        of_part: Slopes = part.slopes(slopes)
        return reference.divergence_gradient(
            self.logits.double(),
            self.teacher_logits.double(),
            part.active(),
            part.rows,
            self.teacher.rows(part.rows),
            stats,
            of_teacher,
            self.teacher.beta,
            slope_mean,
            grad_divergence,
            of_part,
        ).to(self.logits.dtype)

    def write_gradient(
        self,
        stats: RowStats,
        compared: TeacherStats,
        grad_divergence: Tensor,
        slopes: Sequence[Tensor | None],
        *,
        narrow: bool = False,
    ) -> None:
        """Overwrite the logits with dL/dlogits."""
        self.logits.copy_(self.gradient(stats, compared, grad_divergence, slopes))

    def _sums(self, stats: RowStats) -> tuple[tuple[Tensor, Tensor, Tensor], RowStats, RowStats]:
        """Return the sums of a comparison, and the statistics of both rows behind them."""
        part = self._as_part()
        teachers = part._replace(rows=self.teacher.rows(part.rows))
        if self.part is None:
            stats = self._double(self.logits, part)
        of_teacher = self._double(self.teacher_logits, teachers)
        sums = reference.divergence(
            self.logits.double(),
            self.teacher_logits.double(),
            part.active(),
            part.rows,
            teachers.rows,
            stats,
            of_teacher,
            self.teacher.beta,
        )
        return sums, stats, of_teacher

    def _as_part(self) -> PartRows:
        """Return the rows of this rank's part; whole rows count as one part."""
        if self.part is not None:
            return self.part
        rows, ids = self.rows, self.rows.token_ids
        active = ids != rows.ignore_index
        if rows.mask is not None:
            active = active & rows.mask
        known = (ids >= 0) & (ids < self.logits.shape[-1])
        local = rows._replace(token_ids=torch.where(known, ids, 0), mask=active, ignore_index=-1)
        return PartRows(local, known, known)

    def _double(self, logits: Tensor, part: PartRows) -> RowStats:
        return self._stats(logits.double(), part.rows, part)

    def _rounded(self, stats: RowStats) -> RowStats:
        real = arithmetic_dtype(self.logits, self.logits)
        return RowStats._make(x if x.dtype == torch.bool else x.to(real) for x in stats)
