"""Rows of given logits: compared where they are, all at once, or in copies of some at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastrl import native
from fastrl.ops._arguments import RowInputs
from fastrl.ops._companions.companion import (
    Companion,
    Comparison,
    kept_columns,
    place_of,
    rows_of,
)
from fastrl.ops._companions.pair import Upstream
from fastrl.ops._companions.top_k import TopKRows
from fastrl.ops._head.kept_products import kept_chunk_size
from fastrl.ops._lens.rows import Rows
from fastrl.ops._rows.chunk import Chunk, OrderedRows, kept_rows
from fastrl.ops._rows.order import order_rows

#: Bytes of a chunk's copied logits, on a CPU and on a GPU.
_COPY_BYTES = (64 * 2**20, 256 * 2**20)


class GivenRows:
    """Rows of logits `[B, T, V]`.

    Kernels take all rows of the whole vocabulary at once. Kept columns are gathered into copies, as
    are rows for a teacher without logits of its own, a chunk at a time.
    """

    def __init__(self, inputs: RowInputs, *, overwrite: bool = False) -> None:
        """`overwrite` lets the gradient take the place of the logits."""
        logits = inputs.source.logits
        assert logits is not None
        self._inputs, self._logits, self._overwrite = inputs, logits, overwrite
        active, kept = inputs.active.reshape(-1), kept_rows(inputs)
        self.order = order_rows(active, active, compact=kept is not None, kept=kept)
        self._rows = Rows.of(inputs)
        self.companion = Companion(inputs, self.order.indices)
        pieces = [*self.order.pieces(0, self.order.with_gradient)]
        # rows of the whole vocabulary, and whether they keep their place
        self._whole, self._in_place = inputs.active, self.companion.in_place()
        self._dtype = logits.dtype  # of copies
        if inputs.sampler.given() and inputs.teacher.given():
            # slopes of the score may be large and cancel, which rounded gradients could not
            self._dtype = inputs.source.dtype()
            self._in_place &= self._dtype == logits.dtype
        if kept is not None:
            self._whole = inputs.active & (kept.counts == 0).reshape(inputs.active.shape)
            self._in_place &= any(width is None for _, width in pieces)
        self._copies = [*self._places(pieces)]
        if self._copies:
            self._ordered = OrderedRows(inputs, self._rows, self.order, kept)
        self._gradient: Tensor | None = None
        self._gathered: list[Chunk] = []

    def _places(self, pieces: list[tuple[slice, int | None]]) -> Iterator[slice]:
        logits, parts, projection = self._logits, self._inputs.parts, self.companion.projection
        on_gpu = logits.is_cuda
        # the ranks of a split vocabulary exchange the same chunks
        widest = max(parts.sizes, default=logits.shape[-1])
        real = self._inputs.source.dtype()
        whole = max(1, _COPY_BYTES[on_gpu] // (2 * widest * real.itemsize))
        features = 0 if projection is None else projection.hidden.shape[1]
        most = 0
        for rows, width in pieces:
            if width is None and self._in_place:
                continue
            size = whole
            if width is not None:
                size = kept_chunk_size(width, features, real, on_gpu=on_gpu)
                if projection is not None and projection.by_gemm(width):
                    size = min(size, whole)
            for start in range(rows.start, rows.stop, size):
                place = slice(start, min(start + size, rows.stop))
                if projection is not None and projection.by_gemm(width):
                    most = max(most, place.stop - place.start)
                yield place
        if projection is not None and most:
            projection.allocate(most)

    def with_gradient(self) -> Iterator[Chunk]:
        """Yield all rows; those that keep their place come last."""
        for place in self._copies:
            index, rows, columns = self._ordered.at(place)
            if columns is None:
                logits = rows_of(self._logits, index).to(self._dtype, copy=True)
            else:
                logits = kept_columns(self._logits, index, columns.ids).to(self._dtype)
            yield Chunk(place, index, rows, logits[None], columns, None)
        if self._in_place:
            rows = self._rows.among(self._whole)
            yield Chunk(None, slice(None), rows, self._logits, None, None)

    def others(self) -> Iterator[Chunk]:
        """Yield no rows: all may have a gradient."""
        return iter(())

    def comparison(self, chunk: Chunk) -> Comparison:
        """Return the comparison of a chunk, which is valid until the next call."""
        if chunk.place is None:
            return self.companion.comparison_of_all(chunk.rows, chunk.logits)
        return self.companion.comparison_of(chunk.place, chunk.rows, chunk.logits, chunk.columns)

    def write_gradient(self, chunk: Chunk, comparison: Comparison, upstream: Upstream) -> None:
        """Write dL/dlogits of a chunk."""
        if chunk.place is None and not self._overwrite:
            assert not isinstance(comparison, TopKRows)  # it has copies
            self._gradient = comparison.gradient(upstream)
            return
        comparison.write_gradient(upstream)
        if chunk.place is None:
            self._gradient = self._logits
        elif chunk.columns is not None:  # the other columns of these rows are still to be read
            self._gathered.append(chunk)
        else:
            target = self._target()
            target[place_of(target, chunk.where)] = chunk.logits[0].to(target.dtype)

    def _target(self) -> Tensor:
        if self._gradient is None:
            logits = self._gradient = self._logits
            if not self._overwrite:
                self._gradient = native.new_large(logits, logits.shape, logits.dtype)
                if self.order.indices is not None:
                    self._gradient.zero_()
        return self._gradient

    def gradients(self) -> list[Tensor]:
        """Return the gradient of the logits."""
        target = self._target()
        if self._overwrite and not self._in_place and self.order.indices is not None:
            target.masked_fill_(~self._whole[..., None], 0.0)
        for chunk in self._gathered:
            assert chunk.columns is not None
            ids = chunk.columns.ids
            # a column of -1 adds 0 to the first column, also in a row of NaN
            values = chunk.logits[0].masked_fill_(ids < 0, 0.0)
            b, t = place_of(target, chunk.where)
            place = b[:, None], t[:, None], ids.clamp(min=0).to(torch.int64)
            target.index_put_(place, values.to(target.dtype), accumulate=True)
        return [target]
