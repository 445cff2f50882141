"""Rows of logits `[B, T, V]` compared with those of a teacher, on any backend.

Where the vocabulary is split, each rank has the sums over its part, which are added up.
"""

from __future__ import annotations

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
    """What a comparison yields per row; 0 in inactive rows."""

    divergence: Tensor
    teacher_entropy: Tensor
    agrees: Tensor  # bool: the same token is the most probable
    slope_mean: Tensor  # for the backward, as are the others
    row_max: Tensor
    log_sum: Tensor

    def public(self) -> tuple[Tensor, ...]:
        """Return the fields of `TokenStats`, in their order."""
        return self[:3]

    def without_gradient(self) -> tuple[Tensor, ...]:
        """Return those that are not differentiable."""
        return self[1:3]

    def saved(self) -> tuple[Tensor, ...]:
        """Return what the backward needs."""
        return self[3:]

    def indexed(self, index: Any) -> TeacherStats:
        """Index or reshape all of them."""
        return TeacherStats._make(x[index] for x in self)


class Pair(NamedTuple):
    """Rows of a student `[B, T, V]` and of its teacher; `part` is set if they are split."""

    logits: Tensor
    teacher_logits: Tensor
    rows: RowArguments
    teacher: TeacherArguments
    backend: str
    part: PartRows | None
    parts: VocabularyParts

    @classmethod
    def of(
        cls,
        logits: Tensor,
        teacher_logits: Tensor,
        rows: RowArguments,
        teacher: TeacherArguments,
        backend: str,
        part: PartRows | None,
        parts: VocabularyParts,
    ) -> Pair:
        """Return the pair, with the teacher's logits in float64 just where the student's are."""
        given = teacher_logits
        if torch.float64 in (given.dtype, logits.dtype) and given.dtype != logits.dtype:
            given = given.to(arithmetic_dtype(logits, logits))
        given = given if given.stride(-1) == 1 or given.shape[-1] == 1 else given.contiguous()
        return cls(logits, given, rows, teacher, backend, part, parts)

    def student_stats(self) -> RowStats:
        """Return the student's statistics, as the comparison needs them."""
        return self._stats(self.logits, self._part())

    def _whole(self, stats: RowStats) -> RowStats:
        """Return complete statistics: those of the reference backend lack what kernels save."""
        return self.student_stats() if self.backend == "reference" and not self.part else stats

    def _part(self) -> PartRows | None:
        """Return the rows of a part; the reference backend takes whole rows for one, too."""
        if self.part is not None or self.backend != "reference":
            return self.part
        rows, ids = self.rows, self.rows.token_ids
        active = ids != rows.ignore_index
        if rows.mask is not None:
            active = active & rows.mask
        known = (ids >= 0) & (ids < self.logits.shape[-1])
        local = rows._replace(token_ids=torch.where(known, ids, 0), mask=active, ignore_index=-1)
        return PartRows(local, known, known)

    def _teachers(self) -> PartRows | None:
        part = self._part()
        return None if part is None else part._replace(rows=self.teacher.rows(part.rows))

    def _stats(self, logits: Tensor, part: PartRows | None) -> RowStats:
        if part is None:
            rows = self.rows if logits is self.logits else self.teacher.rows(self.rows)
            run = operators(self.backend)
            return RowStats._make(called(run.token_stats_fwd, logits, *rows, True, True))
        local = part_stats(logits, part, self.backend)
        group = self.parts.process_group() if self.part is not None else None
        return combined(gathered(local, group), part)

    def compare(self, stats: RowStats) -> TeacherStats:
        """Return the comparison with a student of these statistics of the whole rows."""
        part, teachers, stats = self._part(), self._teachers(), self._whole(stats)
        of_teacher = self._stats(self.teacher_logits, teachers)
        if self.backend == "reference":
            assert part is not None
            assert teachers is not None
            sums = reference.divergence(
                self.logits,
                self.teacher_logits,
                part.active(),
                part.rows,
                teachers.rows,
                stats,
                of_teacher,
                self.teacher.beta,
            )
        else:
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

    def gradient(
        self,
        stats: RowStats,
        compared: TeacherStats,
        grad_divergence: Tensor,
        slopes: Sequence[Tensor | None],
    ) -> Tensor:
        """Return dL/dlogits; `slopes` are of logprob, entropy and logsumexp, `[B, T]`."""
        if self.backend == "reference":
            return self._reference_gradient(stats, compared, grad_divergence, slopes)
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
        if self.backend == "reference":
            gradient = self._reference_gradient(stats, compared, grad_divergence, slopes)
            self.logits.copy_(gradient)
            return
        arguments = self._backward(stats, compared, grad_divergence, slopes)
        self._operators().divergence_bwd_(*arguments, narrow)

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
            compared.row_max,
            compared.log_sum,
            self.teacher.beta,
            compared.slope_mean,
            grad_divergence.contiguous(),
            *(None if slope is None else slope.contiguous() for slope in of_part),
        )

    def _reference_gradient(
        self,
        stats: RowStats,
        compared: TeacherStats,
        grad_divergence: Tensor,
        slopes: Sequence[Tensor | None],
    ) -> Tensor:
        part, teachers, stats = self._part(), self._teachers(), self._whole(stats)
        assert part is not None
        assert teachers is not None
        unused = torch.empty_like(compared.row_max)
        of_teacher = RowStats._make([unused] * len(RowStats._fields))
        of_teacher = of_teacher._replace(row_max=compared.row_max, log_sum=compared.log_sum)
        of_part: Slopes = part.slopes(slopes)
        return reference.divergence_gradient(
            self.logits,
            self.teacher_logits,
            part.active(),
            part.rows,
            teachers.rows,
            stats,
            of_teacher,
            self.teacher.beta,
            compared.slope_mean,
            grad_divergence,
            of_part,
        )

    def _operators(self) -> Any:
        """Return the operators of this backend; CUDA has those of Triton, or of the CPU."""
        if self.backend != "cuda":
            return operators(self.backend)
        return operators("triton" if self.logits.is_cuda else "cpu")
