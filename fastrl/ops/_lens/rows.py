"""Rows of logits as the kernels take them: over the whole vocabulary, or over this rank's part.

A rank runs the same kernels on its part as on a whole row, with ids of its own columns, and
`reference.whole_stats` combines the results. The backward kernels take the statistics of the whole
row, and exponents relative to its maximum, so only the slopes differ: with y the token,
dL/dz_j = g ([j = y] - p_j) is -g p_j on the ranks that do not have y, which is the gradient of the
log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl import reference
from fastrl.contract import RowArguments, RowStats, ScalingArguments, SoftmaxStats
from fastrl.library import called, operators
from fastrl.ops._arguments import RowInputs, each_tensor
from fastrl.ops._process_groups import gathered, start_gather

Slopes = Sequence[Tensor | None]
Index = Tensor | slice


class Part(NamedTuple):
    """What distinguishes rows of this rank's part of the vocabulary from whole rows."""

    group: dist.ProcessGroup
    own: Tensor  # bool [B, T]: the token belongs to this part
    known: Tensor  # bool [B, T]: the token belongs to some part


class Rows(NamedTuple):
    """Rows `[B, T]` for logits `[B, T, C]`, whose columns are tokens of the vocabulary."""

    arguments: RowArguments  # the ids are columns, 0 for one of another part; bool mask
    backend: str
    part: Part | None  # None: the columns are all that the rows see of the vocabulary
    with_entropy: bool = True
    with_sum_sq_probs: bool = True

    @classmethod
    def of(cls, inputs: RowInputs) -> Rows:
        """Return the rows of a call."""
        arguments, parts = inputs.row_arguments(), inputs.parts
        part = None
        if parts.split():
            start, size = parts.start(), parts.sizes[parts.rank]
            ids = inputs.token_ids
            own = (ids >= start) & (ids < start + size)
            known = (ids >= 0) & (ids < sum(parts.sizes))
            arguments = arguments._replace(token_ids=torch.where(own, ids - start, 0))
            part = Part(parts.process_group(), own, known)
        return cls(arguments, inputs.backend, part, inputs.with_entropy, inputs.with_sum_sq_probs)

    @property
    def active(self) -> Tensor:
        """Which rows are active."""
        return cast("Tensor", self.arguments.mask)

    def packed(self) -> Rows:
        """Reshape rows `[B, T]` to `[1, N]`."""
        if self.active.shape[0] == 1:
            return self
        return each_tensor(lambda x: x.reshape(1, -1), self)

    def taken(self, index: Index) -> Rows:
        """Index packed rows."""
        return each_tensor(lambda x: x[:, index], self)

    def among(self, active: Tensor) -> Rows:
        """Return the rows with others active."""
        return self._replace(arguments=self.arguments._replace(mask=active))

    def at(self, place: Tensor) -> Rows:
        """Return the rows with their tokens at other columns `[B, T]`."""
        if self.part is not None:
            place = torch.where(self.part.own, place, 0)
        return self._replace(arguments=self.arguments._replace(token_ids=place))

    def of_teacher(self, scaling: ScalingArguments) -> Rows:
        """Return a teacher's rows, of which the entropy is always needed."""
        arguments = self.arguments._replace(**scaling._asdict())
        return self._replace(arguments=arguments, with_entropy=True, with_sum_sq_probs=False)

    def exponents(self, logits: Tensor) -> Tensor:
        """Return z of some logits of each row, `[B, T, K]`."""
        real = torch.float64 if logits.dtype == torch.float64 else torch.float32
        z = reference.squashed(logits.to(real), self.arguments)
        scale = 1.0 if self.arguments.logit_softcap else self.arguments.logit_scale
        return z * scale / self._temperature()

    def exponent_slopes(self, logits: Tensor) -> Tensor | float:
        """Return dz/dlogits of these logits."""
        raw_gain = self.arguments.logit_scale / self._temperature()
        if not self.arguments.logit_softcap:
            return raw_gain
        return raw_gain * reference.squash_slope(logits, self.arguments)

    def _temperature(self) -> Tensor | float:
        if self.arguments.temperatures is None:
            return self.arguments.temperature
        return torch.where(self.active, self.arguments.temperatures, 1.0)[..., None]

    def stats(self, logits: Tensor) -> RowStats:
        """Return the statistics of the rows over the whole vocabulary."""
        if self.part is not None:
            return self.combined(gathered(self.part_stats(logits), self.part.group))
        if self.backend == "reference":
            return reference.token_stats(
                logits,
                self.arguments,
                self.active,
                with_entropy=self.with_entropy,
                with_sum_sq_probs=self.with_sum_sq_probs,
            )
        return RowStats._make(self._stats_of_columns(logits))

    def _stats_of_columns(self, logits: Tensor) -> Sequence[Tensor]:
        forward = operators(self.backend).token_stats_fwd
        outputs = (self.with_entropy, self.with_sum_sq_probs)
        return cast("Sequence[Tensor]", called(forward, logits, *self.arguments, *outputs))

    def part_stats(self, logits: Tensor) -> Tensor:
        """Return the fields of `PartStats` of this rank's part, stacked."""
        rows, own = self.arguments, cast("Part", self.part).own
        if self.backend == "reference":
            return torch.stack(reference.part_stats(logits, self.active, own, rows))
        stats = RowStats._make(self._stats_of_columns(logits))
        token_logit = logits.gather(-1, rows.token_ids[..., None])[..., 0].to(stats.log_sum.dtype)
        empty = stats.logsumexp == float("-inf")  # all logits are -inf: it adds nothing
        return torch.stack(
            reference.PartStats(
                row_max=torch.where(empty, float("-inf"), stats.row_max),
                log_sum=stats.log_sum,
                entropy=stats.entropy,
                sum_sq_probs=torch.where(empty, 0.0, stats.sum_sq_probs),
                token_logit=torch.where(own & self.active, token_logit, 0.0),
            )
        )

    def combined(self, of_parts: Tensor) -> RowStats:
        """Return the statistics of whole rows from those of all parts, `[R, fields, B, T]`."""
        fields = reference.PartStats._make(of_parts.unbind(1))
        known = cast("Part", self.part).known
        return reference.whole_stats(fields, self.arguments, self.active, known)

    def gradient(self, logits: Tensor, stats: SoftmaxStats, slopes: Slopes) -> Tensor:
        """Return dL/dlogits; `slopes` are of logprob, entropy and logsumexp, None where 0."""
        if self.backend == "reference":
            return self._by_reference(logits, stats, slopes, overwrite=False)
        backward = operators(self.backend).token_stats_bwd
        return cast("Tensor", backward(logits, *self.arguments, *stats, *self._contiguous(slopes)))

    def write_gradient(
        self, logits: Tensor, stats: SoftmaxStats, slopes: Slopes, *, narrow: bool = False
    ) -> None:
        """Overwrite the logits with `gradient`.

        With `narrow` it is bfloat16 in the second half of each row, see `fastrl/library.py`.
        """
        if self.backend == "reference":
            self._by_reference(logits, stats, slopes, overwrite=True)
            return
        backward = operators(self.backend).token_stats_bwd_
        backward(logits, *self.arguments, *stats, *self._contiguous(slopes), narrow)

    def _by_reference(
        self, logits: Tensor, stats: SoftmaxStats, slopes: Slopes, *, overwrite: bool
    ) -> Tensor:
        return reference.token_gradient(
            logits,
            self.arguments,
            self.active,
            stats,
            self.slopes(slopes),
            is_part=self.part is not None,
            overwrite=overwrite,
        )

    def _contiguous(self, slopes: Slopes) -> Slopes:
        return [None if x is None else x.contiguous() for x in self.slopes(slopes)]

    def slopes(self, slopes: Slopes) -> Slopes:
        """Return the slopes that the kernels of this part take."""
        of_logprob, of_entropy, of_logsumexp = slopes
        if self.part is None or of_logprob is None:
            return slopes
        own, known = self.part.own, self.part.known
        undefined = ~known & (of_logprob != 0)
        of_logprob = torch.where(undefined, float("nan"), of_logprob)
        others = torch.where(own, 0.0, -of_logprob)
        return (
            torch.where(own, of_logprob, 0.0),
            of_entropy,
            others if of_logsumexp is None else others + of_logsumexp,
        )


def slopes_at(logprobs: Tensor, is_token: Tensor, entropy: Tensor, slopes: Slopes) -> Tensor:
    """Return dL/dz of some tokens of each row, `[B, T, K]`, through the statistics of the row."""
    of_logprob, of_entropy, of_logsumexp = (
        0.0 if slope is None else slope[..., None] for slope in slopes
    )
    p = logprobs.exp()
    finite = torch.where(p == 0, 0.0, logprobs)
    result = torch.where(is_token, -torch.expm1(logprobs), -p) * of_logprob
    return result + of_logsumexp * p - of_entropy * p * (finite + entropy[..., None])


class Exchange:
    """The statistics of a part on their way to the other ranks."""

    def __init__(self, rows: Rows, logits: Tensor) -> None:
        """Compute the statistics of this rank's part, and start to send them."""
        assert rows.part is not None
        self._rows, self._own = rows, rows.part_stats(logits)  # kept until it is sent
        self._gathered, self._work = start_gather(self._own, rows.part.group)

    def result(self) -> RowStats:
        """Wait for the other ranks; return the statistics of the whole rows."""
        self._work.wait()
        return self._rows.combined(self._gathered)
