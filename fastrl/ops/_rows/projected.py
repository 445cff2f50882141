"""Rows of logits that are projected from hidden states, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastrl.contract import SoftmaxStats
from fastrl.library import stored_dtype
from fastrl.ops._arguments import RowInputs
from fastrl.ops._companions.companion import Companion, Comparison
from fastrl.ops._companions.pair import Upstream
from fastrl.ops._head.head import HeadGradients
from fastrl.ops._head.hidden_gradient import HiddenGradient
from fastrl.ops._head.kept_products import kept_chunk_size
from fastrl.ops._head.projection import Projection, gradient_of
from fastrl.ops._lens.kept import KeptRows
from fastrl.ops._lens.rows import Rows, Slopes
from fastrl.ops._rows.chunk import Chunk, OrderedRows
from fastrl.ops._rows.order import RowOrder, chunk_size, chunks


class ProjectedRows:
    """Rows of hidden states and an LM head.

    A chunk's logits are overwritten by the next chunk, or by the one after it if the vocabulary is
    split. At its peak, a loss holds the logits and hidden states of a chunk (of the teacher, too),
    the gradient of the head in the dtype of the logits, the gradient of all hidden states, and what
    the GEMMs of a chunk convert. Chunks are freed before the gradient of a 16-bit head is copied to
    its own dtype.
    """

    def __init__(
        self,
        inputs: RowInputs,
        order: RowOrder,
        needs: Sequence[bool],
        kept: KeptRows | None,
        *,
        exchanging: bool = True,
        compacting: bool = False,
    ) -> None:
        """Order the rows and allocate the memory of chunks.

        `needs` tells which of hidden, weight, bias, lora_a and lora_b need a gradient. `kept` has
        all rows in their own order. `exchanging` tells whether statistics are computed, which the
        ranks of a split vocabulary exchange. With `compacting` rows without a slope take no part in
        the GEMMs for gradients, for which the host waits.
        """
        source, parts = inputs.source, inputs.parts
        self.order, self._needs, self._parts = order, needs, parts
        self._on_gpu, self._compacting = inputs.on_gpu(), compacting
        self._ordered = OrderedRows(inputs, Rows.of(inputs), order, kept)
        self._projection = Projection(source, source.dtype(), inputs.backend, parts)
        self.companion = Companion(inputs, order.indices)
        hidden, head = self._projection.hidden, self._projection.head
        teacher = self.companion.projection
        buffers = 2 if exchanging and parts.split() else 1
        size = chunk_size(
            inputs.chunk_tokens,
            head,
            parts,
            buffers,
            None if teacher is None else teacher.head,
            on_gpu=self._on_gpu,
            weight_trained=needs[1],
        )
        pieces = [
            *order.pieces(0, order.with_gradient),
            *order.pieces(order.with_gradient, order.others),
        ]
        counts = [rows.stop - rows.start for rows, width in pieces if self._by_gemm(width)]
        self._size = max(1, min(size, sum(counts)))
        number = sum(-(-count // self._size) for count in counts)
        self._projection.allocate(self._size, min(buffers, number))
        if teacher is not None:
            teacher.allocate(self._size)
        self._parameters = HeadGradients(head, tuple(needs[1:]))
        summed = needs[0] and parts.split() and parts.reduce_hidden_gradient
        self._grad_hidden = HiddenGradient(
            hidden.new_zeros(hidden.shape, dtype=stored_dtype(hidden))
            if needs[0]
            else hidden.new_empty(0),
            parts.process_group() if summed else None,
        )

    def _by_gemm(self, width: int | None) -> bool:
        sides = (self._projection, self.companion.projection)
        return any(side is not None and side.by_gemm(width) for side in sides)

    def with_gradient(self) -> Iterator[Chunk]:
        """Yield the rows that may have a gradient."""
        return self._chunks(0, self.order.with_gradient)

    def others(self) -> Iterator[Chunk]:
        """Yield the rows that need only statistics."""
        return self._chunks(self.order.with_gradient, self.order.others)

    def _chunks(self, start: int, count: int) -> Iterator[Chunk]:
        dtype, teacher = self._projection.head.dtype, self.companion.projection
        features = self._projection.hidden.shape[1]
        if teacher is not None:
            features += teacher.hidden.shape[1]
        for rows, width in self.order.pieces(start, count):
            size = self._size
            if width is not None and not self._by_gemm(width):
                size = kept_chunk_size(width, features, dtype, on_gpu=self._on_gpu)
            for place in chunks(rows.start, rows.stop - rows.start, size, on_gpu=self._on_gpu):
                yield self._chunk(place)

    def _chunk(self, place: slice) -> Chunk:
        """Compute the logits of a chunk."""
        index, rows, columns = self._ordered.at(place)
        width, ids = (None, None) if columns is None else (columns.width, columns.ids)
        active = rows.active[0] if self.order.indices is None else None  # has masked rows
        projected = self._projection.project(index, width, ids, active)
        return Chunk(place, index, rows, projected.logits[None], columns, projected)

    def comparison(self, chunk: Chunk) -> Comparison:
        """Return the comparison of a chunk, which is valid until the next call."""
        assert chunk.place is not None
        return self.companion.comparison_of(chunk.place, chunk.rows, chunk.logits, chunk.columns)

    def write_gradient(self, chunk: Chunk, comparison: Comparison, upstream: Upstream) -> None:
        """Overwrite the logits of a chunk with dL/dlogits, and add the gradients of its rows."""
        assert chunk.projected is not None
        if self._compacting:
            self._write_compacted(chunk, upstream.stats, upstream.slopes)
            return
        comparison.write_gradient(upstream, narrow=chunk.projected.products.narrow)
        self.add_gradients(chunk)

    def may_flow(self, chunk: Chunk) -> bool:
        """Return whether rows of a chunk may have a gradient; 0s are left out by compacting."""
        assert chunk.place is not None
        return self._compacting or chunk.place.start < self.order.with_gradient

    def _write_compacted(self, chunk: Chunk, stats: SoftmaxStats, slopes: Slopes) -> None:
        """Do the same for rows that have a slope, of whole vocabularies without a teacher."""
        projected, rows = chunk.projected, chunk.rows
        assert projected is not None
        has_gradient = torch.stack([x[0] != 0 for x in slopes if x is not None]).any(0)
        remaining = None
        if not bool(has_gradient.all()):
            logits, remaining = _compacted(projected.logits, has_gradient)
            projected, rows = projected.taken(remaining, logits), rows.taken(remaining)
            stats = SoftmaxStats._make(x[:, remaining] for x in stats)
            slopes = [None if x is None else x[:, remaining] for x in slopes]
        if projected.logits.shape[0]:
            narrow = projected.products.narrow
            rows.write_gradient(projected.logits[None], stats, slopes, narrow=narrow)
            self.add_gradients(chunk._replace(projected=projected), remaining)

    def add_gradients(self, chunk: Chunk, remaining: Tensor | None = None) -> None:
        """Add the gradients of a chunk; `remaining` has the rows in it, None if they are all."""
        projected = chunk.projected
        assert projected is not None
        products, states = projected.products, projected.states
        dtype = self._projection.head.dtype
        grad_states = torch.empty_like(states, dtype=dtype) if self._needs[0] else None
        gradient = gradient_of(projected.logits, narrow=products.narrow)
        self._parameters.add(products, gradient, states, grad_states)
        if grad_states is not None:
            index = chunk.where
            if remaining is not None and isinstance(index, Tensor):
                index = index[remaining]
            self._grad_hidden.put(index, grad_states)

    def pass_on_nan(self, chunk: Chunk, logprobs: Tensor) -> None:
        """Let NaN log-probabilities of rows without a gradient reach all gradients.

        The slopes of these rows are 0 times NaN, but the rows take part in no GEMM for gradients.
        """
        nan = torch.where(logprobs.isnan(), logprobs, 0.0)[0]
        if self._needs[0]:
            self._grad_hidden.put_same(chunk.where, nan[:, None])
        before = self._parameters.poison
        self._parameters.poison = nan.sum() if before is None else before + nan.sum()

    def gradients(self) -> list[Tensor]:
        """Free the memory of the chunks, and return the gradients accumulated over them.

        The caller must drop the last chunk, too.
        """
        self._projection.free()
        del self.companion
        if self._parts.split():
            self._parameters.sum_low_rank_over(self._parts.process_group())
        results = (self._grad_hidden.result(), *self._parameters.results())
        return [x for x, need in zip(results, self._needs, strict=True) if need]


def _compacted(logits: Tensor, has_gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Move rows with a gradient to the front of a chunk; return these rows and their old indices.

    Rows from the end replace those without a gradient, so no others are copied.
    """
    count = int(has_gradient.sum())
    kept = torch.arange(count, device=has_gradient.device)
    gaps = (~has_gradient[:count]).nonzero()[:, 0]
    fillers = count + has_gradient[count:].nonzero()[:, 0]
    kept[gaps] = fillers
    for gap, filler in zip(gaps.tolist(), fillers.tolist(), strict=True):
        logits[gap].copy_(logits[filler])
    return logits[:count], kept
