"""What goes along with the rows of a call, by chunks: a teacher's rows, the sampler's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.contract import ScalingArguments
from fastrl.ops._arguments import RowInputs, each_tensor
from fastrl.ops._companions.centered_rows import CenteredRows, SamplerTokens
from fastrl.ops._companions.pair import Pair, RowsAlone, pair_of
from fastrl.ops._companions.top_k import TopKRows
from fastrl.ops._head.projection import Projection
from fastrl.ops._lens.kept import Columns
from fastrl.ops._lens.rows import Rows

Comparison = RowsAlone | Pair | TopKRows | CenteredRows


class Companion:
    """What goes along with the rows of a call: a teacher, the sampler's most likely tokens."""

    def __init__(self, inputs: RowInputs, index: Tensor | None) -> None:
        """Order the teacher's rows like those of the call, by `index`; None: as they are."""
        teacher, self._sampler = inputs.teacher, inputs.sampler
        self._teacher, self._index, self._parts = teacher, index, inputs.parts
        self._token_ids = inputs.token_ids
        #: the logits of a teacher's head, or None
        self.projection: Projection | None = None
        if teacher.source.hidden is not None:
            self.projection = Projection(
                teacher.source, inputs.source.dtype(), inputs.backend, inputs.parts
            )

    def in_place(self) -> bool:
        """Return whether rows of given logits can be compared where they are, all at once."""
        return not self._teacher.given() or self._teacher.source.logits is not None

    def comparison_of_all(self, rows: Rows, logits: Tensor) -> RowsAlone | Pair | CenteredRows:
        """Return the comparison of all rows `[B, T]` in their place."""
        teacher = self._teacher
        compared: RowsAlone | Pair = RowsAlone(rows, logits)
        if teacher.source.logits is not None:
            given = teacher.source.logits
            compared = pair_of(rows, logits, given, teacher.scaling, teacher.beta)
        if not self._sampler.given():
            return compared
        sampler = each_tensor(lambda x: x.view(*rows.active.shape, x.shape[-1]), self._sampler)
        tokens = SamplerTokens(rows, self._token_ids, logits, sampler, self._parts, None)
        return CenteredRows(tokens, logits, compared)

    def comparison_of(
        self, place: slice, rows: Rows, logits: Tensor, columns: Columns | None
    ) -> Comparison:
        """Return the comparison of ordered rows, packed `[1, C]`, whose logits may be written."""
        index = place if self._index is None else self._index[place]
        if not self._sampler.given():
            return self._compared(index, rows, logits, columns)
        sampler = each_tensor(lambda x: x[index][None], self._sampler)
        token_ids = self._token_ids.reshape(1, -1)[:, index]
        tokens = SamplerTokens(rows, token_ids, logits, sampler, self._parts, columns)
        # the comparison with a teacher may write the logits
        return CenteredRows(tokens, logits, self._compared(index, rows, logits, columns))

    def _compared(
        self, index: slice | Tensor, rows: Rows, logits: Tensor, columns: Columns | None
    ) -> RowsAlone | Pair | TopKRows:
        if not self._teacher.given():
            return RowsAlone(rows, logits)
        teacher, scaling = self._teacher, self._scaling(index)
        if teacher.token_ids is not None and teacher.logprobs is not None:
            some = teacher._replace(
                token_ids=teacher.token_ids[index], logprobs=teacher.logprobs[index]
            )
            token_ids = self._token_ids.reshape(1, -1)[:, index]
            return TopKRows(rows, logits, token_ids, some, self._parts)
        teacher_logits = self._logits_of(index, columns)[None]
        return pair_of(rows, logits, teacher_logits, scaling, teacher.beta)

    def _scaling(self, index: slice | Tensor) -> ScalingArguments:
        scaling = self._teacher.scaling
        return each_tensor(lambda x: x.reshape(1, -1)[:, index].contiguous(), scaling)

    def _logits_of(self, index: slice | Tensor, columns: Columns | None) -> Tensor:
        """Return the teacher's logits `[C, V]` or `[C, K]`."""
        if self.projection is not None:
            if columns is None:
                return self.projection.project(index, None, None).logits
            return self.projection.project(index, columns.width, columns.ids).logits
        given = self._teacher.source.logits
        assert given is not None
        return rows_of(given, index) if columns is None else kept_columns(given, index, columns.ids)


def rows_of(logits: Tensor, index: slice | Tensor) -> Tensor:
    """Return rows of `[B, T, V]` by their index in `[B T]`, without a copy if that is possible."""
    batch, tokens = logits.shape[:2]
    if min(batch, tokens) <= 1 or logits.stride(0) == tokens * logits.stride(1):
        return logits.reshape(-1, logits.shape[-1])[index]
    return logits[place_of(logits, index)]


def place_of(logits: Tensor, index: slice | Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of rows in both dimensions of `[B, T, V]`, by their index in `[B T]`."""
    if isinstance(index, slice):
        index = torch.arange(index.start, index.stop, device=logits.device)
    tokens = logits.shape[1]
    return index // tokens, index % tokens


def kept_columns(logits: Tensor, index: slice | Tensor, ids: Tensor) -> Tensor:
    """Return the columns `ids` `[C, K]` of rows of `[B, T, V]`, -inf where the id is -1."""
    b, t = place_of(logits, index)
    place = b[:, None], t[:, None], ids.clamp(min=0).to(torch.int64)
    return logits[place].masked_fill_(ids < 0, float("-inf"))
