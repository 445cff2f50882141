"""Rows of a student's logits, compared with a teacher's logits for the same columns.

If the vocabulary is split, each rank computes the sums over its part, and the ranks add them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import RowStats, ScalingArguments, SoftmaxStats, TeacherStats
from fastrl.library import arithmetic_dtype, operators
from fastrl.ops._lens.rows import Rows, Slopes
from fastrl.ops._process_groups import total


class SavedComparison(NamedTuple):
    """What the backward needs of a comparison, `[B, T]`."""

    slope_mean: Tensor
    row_max: Tensor  # of the teacher's rows, as is the next
    log_sum: Tensor


class Compared(NamedTuple):
    """The results of a comparison."""

    stats: TeacherStats
    saved: SavedComparison


class Upstream(NamedTuple):
    """Statistics of rows, `[B, T]`, and the gradients of a loss by them."""

    stats: SoftmaxStats
    slopes: Slopes  # by logprob, entropy and logsumexp; None: 0
    comparison: SavedComparison | None  # with a teacher
    grad_divergence: Tensor | None
    grad_centering: Tensor | None

    def of_divergence(self) -> tuple[SavedComparison, Tensor]:
        """Return a comparison and its gradient, 0 for a row where that would be infinite."""
        comparison, grad = self.comparison, self.grad_divergence
        assert comparison is not None
        assert grad is not None
        return comparison, torch.where(comparison.slope_mean.isinf(), 0.0, grad)


class RowsAlone:
    """Rows without a teacher, with the interface of `Pair`."""

    def __init__(self, rows: Rows, logits: Tensor) -> None:
        """Take rows `[B, T]` of logits `[B, T, C]`."""
        self._rows, self._logits = rows, logits

    def compare(self, stats: SoftmaxStats) -> None:
        """There is nothing to compare."""

    def gradient(self, upstream: Upstream) -> Tensor:
        """Return dL/dlogits."""
        return self._rows.gradient(self._logits, upstream.stats, upstream.slopes)

    def write_gradient(self, upstream: Upstream, *, narrow: bool = False) -> None:
        """Overwrite the logits with dL/dlogits."""
        stats, slopes = upstream.stats, upstream.slopes
        self._rows.write_gradient(self._logits, stats, slopes, narrow=narrow)


class Pair:
    """Rows `[B, T]` of a student and of its teacher, for the kernels."""

    def __init__(
        self,
        rows: Rows,
        logits: Tensor,
        teacher_logits: Tensor,
        scaling: ScalingArguments,
        beta: float,
    ) -> None:
        """Compare logits `[B, T, C]`; `scaling` is the teacher's."""
        # float64 exactly where the student's logits are
        if torch.float64 in (teacher_logits.dtype, logits.dtype):
            teacher_logits = teacher_logits.to(arithmetic_dtype(logits, logits))
        unit = teacher_logits.stride(-1) == 1 or teacher_logits.shape[-1] == 1
        self._teacher_logits = teacher_logits if unit else teacher_logits.contiguous()
        self._logits, self._scaling, self._beta = logits, scaling, beta
        self._rows, self._teacher_rows = rows, rows.of_teacher(scaling)

    def student_stats(self) -> RowStats:
        """Return the student's statistics."""
        return self._rows.stats(self._logits)

    def compare(self, stats: SoftmaxStats) -> Compared:
        """Return the comparison with a student of these statistics of the whole rows."""
        teacher_stats = self._teacher_rows.stats(self._teacher_logits)
        sums = self._operators().divergence_fwd(
            self._logits,
            self._teacher_logits,
            *self._rows.arguments,
            *self._scaling,
            stats.row_max,
            stats.log_sum,
            teacher_stats.row_max,
            teacher_stats.log_sum,
            self._beta,
        )
        return self._compared(sums, teacher_stats)

    def gradient(self, upstream: Upstream) -> Tensor:
        """Return dL/dlogits."""
        return cast("Tensor", self._operators().divergence_bwd(*self._backward(upstream)))

    def write_gradient(self, upstream: Upstream, *, narrow: bool = False) -> None:
        """Overwrite the logits with dL/dlogits."""
        self._operators().divergence_bwd_(*self._backward(upstream), narrow)

    def _compared(self, sums: Sequence[Tensor], teacher_stats: RowStats) -> Compared:
        """Return the comparison from its sums over whole rows, or over this rank's part of them."""
        divergence, slope_mean, agrees = sums
        if self._rows.part is not None:
            stacked = torch.stack([divergence, slope_mean, agrees.to(divergence.dtype)])
            divergence, slope_mean, found = total(stacked, self._rows.part.group).unbind()
            agrees = found > 0
        return Compared(
            TeacherStats(divergence.clamp(min=0), teacher_stats.entropy, agrees),
            SavedComparison(slope_mean, teacher_stats.row_max, teacher_stats.log_sum),
        )

    def _backward(self, upstream: Upstream) -> tuple[object, ...]:
        saved, grad_divergence = upstream.of_divergence()
        slopes = self._rows.slopes(upstream.slopes)
        return (
            self._logits,
            self._teacher_logits,
            *self._rows.arguments,
            *self._scaling,
            *upstream.stats,
            *(None if x is None else x.contiguous() for x in slopes),
            saved.row_max,
            saved.log_sum,
            self._beta,
            saved.slope_mean,
            grad_divergence.contiguous(),
        )

    def _operators(self) -> Any:
        """Return the operators of this backend; CUDA uses Triton's or the CPU's."""
        if self._rows.backend != "cuda":
            return operators(self._rows.backend)
        return operators("triton" if self._logits.is_cuda else "cpu")


class ReferencePair(Pair):
    """A `Pair` in float64, which recomputes the statistics of whole rows in float64."""

    def student_stats(self) -> RowStats:
        """Return the student's statistics."""
        return self._rounded(self._rows.stats(self._logits.double()))

    def compare(self, stats: SoftmaxStats) -> Compared:
        """Return the comparison with a student of these statistics of the whole rows."""
        sums, _, teacher_stats = self._sums(stats)
        real = arithmetic_dtype(self._logits, self._logits)
        rounded = [x if x.dtype == torch.bool else x.to(real) for x in sums]
        return self._compared(rounded, self._rounded(teacher_stats))

    def gradient(self, upstream: Upstream) -> Tensor:
        """Return dL/dlogits."""
        saved, grad_divergence = upstream.of_divergence()
        stats = SoftmaxStats._make(x.double() for x in upstream.stats)
        slope_mean = saved.slope_mean
        teacher_stats = SoftmaxStats(saved.row_max, saved.log_sum, saved.log_sum)
        if self._rows.part is None:
            (_, slope_mean, _), stats, whole = self._sums(stats)
            teacher_stats = whole.of_softmax()
        return reference.divergence_gradient(
            self._logits.double(),
            self._teacher_logits.double(),
            self._rows.active,
            self._rows.arguments,
            self._teacher_rows.arguments,
            stats,
            teacher_stats,
            self._beta,
            slope_mean,
            grad_divergence,
            self._rows.slopes(upstream.slopes),
        ).to(self._logits.dtype)

    def write_gradient(self, upstream: Upstream, *, narrow: bool = False) -> None:
        """Overwrite the logits with dL/dlogits."""
        self._logits.copy_(self.gradient(upstream))

    def _sums(
        self, stats: SoftmaxStats
    ) -> tuple[tuple[Tensor, Tensor, Tensor], SoftmaxStats, RowStats]:
        """Return the sums of a comparison, and the statistics of both rows behind them."""
        logits, teacher_logits = self._logits.double(), self._teacher_logits.double()
        if self._rows.part is None:
            stats = self._rows.stats(logits).of_softmax()
        teacher_stats = self._teacher_rows.stats(teacher_logits)
        sums = reference.divergence(
            logits,
            teacher_logits,
            self._rows.active,
            self._rows.arguments,
            self._teacher_rows.arguments,
            stats,
            teacher_stats.of_softmax(),
            self._beta,
        )
        return sums, stats, teacher_stats

    def _rounded(self, stats: RowStats) -> RowStats:
        real = arithmetic_dtype(self._logits, self._logits)
        return RowStats._make(x if x.dtype == torch.bool else x.to(real) for x in stats)


def pair_of(
    rows: Rows, logits: Tensor, teacher_logits: Tensor, scaling: ScalingArguments, beta: float
) -> Pair:
    """Return the pair of a student's and a teacher's rows."""
    kind = ReferencePair if rows.backend == "reference" else Pair
    return kind(rows, logits, teacher_logits, scaling, beta)
