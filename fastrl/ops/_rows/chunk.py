"""Chunks of the rows of a call, and values that belong to each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from fastrl.contract import RowStats
from fastrl.ops._arguments import Fields, RowInputs, each_tensor
from fastrl.ops._companions.sampler_arguments import check_sampler
from fastrl.ops._companions.top_k import check_tokens
from fastrl.ops._head.projection import Projected
from fastrl.ops._lens.kept import Columns, KeptRows, check_kept, ids_of_part
from fastrl.ops._lens.rows import Exchange, Rows
from fastrl.ops._row_checks import check_ids
from fastrl.ops._rows.order import RowOrder


class Chunk(NamedTuple):
    """Some of the rows, and their logits, which may be overwritten."""

    place: slice | None  # among the ordered rows `[1, C]`; None: all rows `[B, T]`, as they are
    where: slice | Tensor  # among all rows
    rows: Rows
    logits: Tensor  # [1, C, V], [1, C, K] of kept columns, or [B, T, V]
    columns: Columns | None
    projected: Projected | None


class OrderedRows:
    """The rows of a call, in the order in which they are processed."""

    def __init__(
        self, inputs: RowInputs, rows: Rows, order: RowOrder, kept: KeptRows | None
    ) -> None:
        """`kept` has all rows in their own order, as has `rows`."""
        self.order, self._parts = order, inputs.parts
        self._rows = rows.packed()
        self._token_ids = order.of(inputs.token_ids)[0]
        self._kept = None
        if order.indices is not None:
            self._rows = self._rows.taken(order.indices)
            self._kept = None if kept is None else kept.taken(order.indices)

    def at(self, place: slice) -> tuple[slice | Tensor, Rows, Columns | None]:
        """Return the index of ordered rows among all rows, and the rows.

        If they have not the whole vocabulary, their kept columns come last.
        """
        rows, width = self._rows.taken(place), self.order.width(place)
        index = place if self.order.indices is None else self.order.indices[place]
        if width is None:
            return index, rows, None
        assert self._kept is not None
        columns = self._kept.taken(place).columns(self._token_ids[place], width)
        ids = ids_of_part(columns, self._parts)
        return index, rows.at(columns.place[None]), Columns(ids, width)


class PerRow(Generic[Fields]):
    """Tuples of tensors that have a value for each row of a call."""

    def __init__(self, order: RowOrder, fields: Fields) -> None:
        """Take tensors in the shape of the token ids."""
        self._order, self._fields = order, fields
        self._ordered: Fields | None = None

    def of(self, chunk: Chunk) -> Fields:
        """Return the values of a chunk's rows."""
        place = chunk.place
        if place is None:
            return self._fields
        if self._ordered is None:
            self._ordered = each_tensor(self._order.of, self._fields)
        return each_tensor(lambda x: x[:, place], self._ordered)


class Results:
    """Tensors with a value for each row, which chunks fill; 0 at rows of no chunk."""

    def __init__(self, like: Tensor, dtypes: Sequence[torch.dtype]) -> None:
        """Return results in the shape of `like`."""
        self._like, self._dtypes = like, dtypes
        self._values: list[Tensor] = []

    def put(self, chunk: Chunk, values: Sequence[Tensor]) -> None:
        """Store the values of a chunk's rows; those of rows in their place come last."""
        if chunk.place is None:
            active, before = chunk.rows.active, self._values
            self._values = [*values]
            if before:
                pairs = zip(values, before, strict=True)
                self._values = [torch.where(active, one, other) for one, other in pairs]
            return
        for each, some in zip(self.values(), values, strict=True):
            each.view(-1)[chunk.where] = some[0]

    def values(self) -> list[Tensor]:
        """Return the values of all rows."""
        if not self._values:
            shape = self._like.shape
            self._values = [self._like.new_zeros(shape, dtype=dtype) for dtype in self._dtypes]
        return self._values


def with_stats(chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, RowStats]]:
    """Yield chunks with the statistics of their rows.

    If the vocabulary is split, the ranks exchange their statistics while the next chunk is made, or
    while the caller works on the previous one.
    """
    before: tuple[Chunk, Exchange] | None = None
    for chunk in chunks:
        if chunk.rows.part is None:
            yield chunk, chunk.rows.stats(chunk.logits)
            continue
        exchange = Exchange(chunk.rows, chunk.logits)
        if before is not None:
            yield before[0], before[1].result()
        before = chunk, exchange
    if before is not None:
        yield before[0], before[1].result()


def kept_rows(inputs: RowInputs) -> KeptRows | None:
    """Return the kept tokens of the rows, or None if all have the whole vocabulary."""
    if inputs.kept.ids is None:
        return None
    return KeptRows.of(inputs.kept, inputs.token_ids.reshape(-1), inputs.vocabulary())


def check_values(inputs: RowInputs) -> None:
    """Raise for invalid values, which the trace of a function cannot check."""
    active, vocabulary = inputs.active.reshape(-1), inputs.vocabulary()
    check_ids(inputs.token_ids, inputs.active, vocabulary)
    check_kept(inputs.kept, active, vocabulary)
    check_tokens(inputs.teacher, active, vocabulary)
    check_sampler(inputs.sampler, active, vocabulary)
