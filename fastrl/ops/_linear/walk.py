"""The rows of a linear call, processed chunk by chunk in the same buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import native
from fastrl.contract import FLAGS, RowArguments, RowStats
from fastrl.library import stored_dtype
from fastrl.ops._kept.rows import NO_ID, KeptRows, ids_of_part
from fastrl.ops._linear.call import LinearCall
from fastrl.ops._linear.chunks import (
    RowOrder,
    chunk_size,
    chunk_stats,
    chunks,
    gradient_of,
    in_batch,
    row_stride,
    take_rows,
)
from fastrl.ops._linear.head import HeadGradients, Products
from fastrl.ops._linear.hidden_gradient import HiddenGradient
from fastrl.ops._linear.kept import GemmKeptProducts, KeptProducts, kept_chunk_size, widest
from fastrl.ops._linear.products import choose_products
from fastrl.ops._teacher.chunks import Comparison, TeacherChunks, teacher_head
from fastrl.ops._teacher.rows import TeacherStats
from fastrl.ops._vocabulary_parts.statistics import Exchange, PartRows, part_stats


class LinearGradients(NamedTuple):
    """Gradients of hidden states and parameters, empty if not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    lora_a: Tensor
    lora_b: Tensor


class ChunkBuffer(NamedTuple):
    """Memory for a chunk: its logits, and its hidden states as operands of the GEMMs."""

    logits: Tensor
    states: Tensor


class Projected(NamedTuple):
    """A chunk: its hidden states as operands of the products, its logits and row arguments.

    The logits are `[C, V]`, or `[C, K]` if rows kept a part of the vocabulary; token ids are then
    columns of this part.
    """

    products: Products
    states: Tensor
    logits: Tensor
    rows: RowArguments
    part: PartRows | None  # the rows of this rank's part of a split vocabulary

    def taken(self, rows: Tensor, logits: Tensor) -> Projected:
        """Return some rows of a chunk of a whole vocabulary, with these logits."""
        products, states = self.products.taken(rows), self.states[rows]
        return Projected(products, states, logits, take_rows(self.rows, rows), None)


class LinearWalk:
    """The rows of a call in their order; a chunk is a slice of it.

    A chunk's logits are overwritten by the next chunk, or by the one after it if the vocabulary is
    split.
    """

    def __init__(
        self,
        call: LinearCall,
        order: RowOrder,
        needs: list[bool],
        kept: KeptRows | None = None,
        *,
        exchanging: bool = True,
    ) -> None:
        """Order the rows and allocate the buffers.

        `needs` tells which of hidden, weight, bias, lora_a and lora_b need a gradient. `kept` has
        all rows in their own order. `exchanging` tells whether statistics are computed, which the
        ranks of a split vocabulary exchange.
        """
        hidden, head = call.hidden, call.head()
        self._hidden, self._head, self._order, self._needs = hidden, head, order, needs
        self._on_gpu = call.on_gpu()
        self._rows = call.rows if order.indices is None else take_rows(call.rows, order.indices)
        self._products = choose_products(
            hidden, head.weight, head.dtype, call.backend, call.operand_dtype
        )
        self._backend, self._parts = call.backend, call.parts
        self._kept = None
        if kept is not None:
            assert order.indices is not None
            self._kept = kept.taken(order.indices)
        #: number of kept tokens from which a row is multiplied with the whole vocabulary
        self._widest = widest(head.vocabulary, self._products, call.parts, on_gpu=self._on_gpu)
        self._part = None
        if call.parts.split():
            assert self._rows.mask is not None
            self._part = PartRows.of(self._rows, self._rows.mask, call.parts)
        pieces = ((rows.stop - rows.start, width) for rows, width in self._pieces())
        counts = [count for count, width in pieces if self._by_gemm(width)]
        buffers = 2 if exchanging and call.parts.split() else 1
        teacher = teacher_head(call.teacher, head.dtype)
        size = chunk_size(
            call.chunk_tokens,
            head,
            call.parts,
            buffers,
            teacher,
            on_gpu=self._on_gpu,
            weight_trained=needs[1],
        )
        self._size = max(1, min(size, sum(counts)))
        number = sum(-(-count // self._size) for count in counts)
        self._stride = row_stride(head.vocabulary, on_gpu=self._on_gpu)
        # a list: a generator would refer to self, and only the cyclic collector could free it
        self._buffers = itertools.cycle(
            [self._new_buffer(hidden) for _ in range(min(buffers, number))]
        )
        self._teacher = None
        if call.teacher.given():
            self._teacher = TeacherChunks(
                call.teacher, order.indices, self._size, head.dtype, call.backend, call.parts
            )
        self._parameters = HeadGradients(head, tuple(needs[1:]))
        summed = needs[0] and call.parts.split() and call.parts.reduce_hidden_gradient
        self._grad_hidden = HiddenGradient(
            hidden.new_zeros(hidden.shape, dtype=stored_dtype(hidden))
            if needs[0]
            else hidden.new_empty(0),
            call.parts.process_group() if summed else None,
        )

    def _new_buffer(self, hidden: Tensor) -> ChunkBuffer:
        dtype = self._products.operand_dtype
        return ChunkBuffer(
            native.new_large(hidden, (self._size, self._stride), self._head.dtype),
            hidden.new_empty((self._size, hidden.shape[1]), dtype=dtype),
        )

    def trained(self) -> Iterator[slice]:
        """Yield chunks of the rows that may have a gradient."""
        return self._chunks(0, self._order.trained)

    def scored(self) -> Iterator[slice]:
        """Yield chunks of the rows that need only statistics."""
        return self._chunks(self._order.trained, self._order.scored)

    def _chunks(self, start: int, count: int) -> Iterator[slice]:
        for rows, width in self._order.pieces(start, count):
            size = self._size
            if width is not None and not self._by_gemm(width):
                size = kept_chunk_size(width, self._hidden, self._head.dtype, on_gpu=self._on_gpu)
            yield from chunks(rows.start, rows.stop - rows.start, size, on_gpu=self._on_gpu)

    def _pieces(self) -> Iterator[tuple[slice, int | None]]:
        order = self._order
        yield from order.pieces(0, order.trained)
        yield from order.pieces(order.trained, order.scored)

    def _by_gemm(self, width: int | None) -> bool:
        """Return whether rows are multiplied with the whole vocabulary."""
        return width is None or width >= self._widest

    def with_stats(self, chunks: Iterable[slice]) -> Iterator[tuple[Projected, RowStats]]:
        """Project chunks; yield each with the statistics of its rows.

        If the vocabulary is split, the ranks exchange their statistics while the next chunk is
        projected, or while the caller works on the previous one.
        """
        before: tuple[Projected, Exchange] | None = None
        for chunk in chunks:
            projected = self.project(chunk)
            if projected.part is None:
                yield projected, chunk_stats(projected.logits, projected.rows, self._backend)
                continue
            batch = in_batch(projected.part)
            stats = part_stats(projected.logits[None], batch, self._backend)
            exchange = Exchange(stats, self._parts)
            if before is not None:
                yield _received(*before)
            before = projected, exchange
        if before is not None:
            yield _received(*before)

    def project(self, chunk: slice) -> Projected:
        """Compute the logits of a chunk."""
        indices, rows = self._order.indices, take_rows(self._rows, chunk)
        hidden = self._hidden[chunk if indices is None else indices[chunk]]
        width = self._order.width(chunk)
        part = None if self._part is None else self._part.taken(chunk)
        states = logits = hidden.new_empty(0)
        if self._by_gemm(width):
            buffer = next(self._buffers)
            states = buffer.states[: hidden.shape[0]].copy_(hidden)
            logits = buffer.logits[: hidden.shape[0], : self._head.vocabulary]
        products: Products = self._products
        if width is None:
            if indices is None:  # includes masked rows: 0 * NaN would reach the weight
                assert rows.mask is not None
                states.masked_fill_(~rows.mask[:, None], 0.0)
        else:
            assert self._kept is not None
            columns = self._kept.taken(chunk).columns(rows.token_ids, width)
            head, ids = self._head, ids_of_part(columns, self._parts)
            products = KeptProducts(head.weight, head.dtype, ids, self._backend)
            if self._by_gemm(width):
                products = GemmKeptProducts(self._products, logits, products)
            else:
                states = hidden
            logits = hidden.new_empty(ids.shape, dtype=head.dtype)
            rows = rows._replace(token_ids=columns.place, ignore_index=NO_ID)
            part = None if part is None else part.at(columns.place)
        self._head.project(products, states, logits)
        return Projected(products, states, logits, rows, part)

    def compare(self, chunk: slice, projected: Projected) -> Comparison | None:
        """Return the comparison of a chunk with the teacher's rows, if there is a teacher."""
        if self._teacher is None:
            return None
        return self._teacher.beside(chunk, projected.logits, projected.rows, projected.part)

    def gradient(self, projected: Projected) -> Tensor:
        """Return dL/dlogits that an operator has written over the logits of a chunk."""
        return gradient_of(projected.logits, narrow=projected.products.narrow)

    def add_gradients(
        self, chunk: slice, projected: Projected, remaining: Tensor | None = None
    ) -> None:
        """Add the gradients of a chunk, or of the rows that `remaining` selects."""
        products, states = projected.products, projected.states
        grad_states = torch.empty_like(states, dtype=self._head.dtype) if self._needs[0] else None
        self._parameters.add(products, self.gradient(projected), states, grad_states)
        if grad_states is not None:
            place: slice | Tensor = chunk
            if self._order.indices is not None:
                place = self._order.indices[chunk]
                place = place if remaining is None else place[remaining]
            self._grad_hidden.put(place, grad_states)

    def pass_on_nan(self, chunk: slice, logprobs: Tensor) -> None:
        """Let NaN log-probabilities of scored rows reach all gradients.

        The slopes of these rows are 0 times NaN, but the rows take part in no GEMM for gradients.
        """
        nan = torch.where(logprobs.isnan(), logprobs, 0.0)
        if self._needs[0]:
            assert self._order.indices is not None  # all rows are trained without an order
            place = self._order.indices[chunk]
            self._grad_hidden.put_same(place, nan[:, None])
        before = self._parameters.poison
        self._parameters.poison = nan.sum() if before is None else before + nan.sum()

    def no_stats(self) -> RowStats:
        """Return zero statistics for the rows in their order."""
        like, dtype = self._rows.token_ids, self._head.dtype
        return RowStats._make(
            torch.zeros_like(like, dtype=torch.bool if name in FLAGS else dtype)
            for name in RowStats._fields
        )

    def no_teacher_stats(self) -> TeacherStats:
        """Return a zero comparison for the rows in their order, or one of no rows."""
        like, dtype = self._rows.token_ids, self._head.dtype
        like = like[:0] if self._teacher is None else like
        zeros = TeacherStats._make(
            torch.zeros_like(like, dtype=dtype) for _ in TeacherStats._fields
        )
        return zeros._replace(agrees=torch.zeros_like(like, dtype=torch.bool))

    def expanded(self, values: Tensor) -> Tensor:
        """Return values in the order of processing for all rows `[N]`, 0 at unprocessed ones."""
        if self._order.indices is None:
            return values
        result = values.new_zeros(self._hidden.shape[0])
        result[self._order.indices] = values
        return result

    def expanded_comparison(self, compared: TeacherStats) -> Iterator[Tensor]:
        """Yield the tensors of a comparison for all rows, if there is one."""
        for values in compared:
            yield values if self._teacher is None else self.expanded(values)

    def gradients(self) -> LinearGradients:
        """Free the memory of the chunks, and return the gradients accumulated over them.

        The caller must drop the last chunk, too.
        """
        del self._buffers, self._teacher
        if self._parts.split():
            self._parameters.sum_low_rank_over(self._parts.process_group())
        return LinearGradients(self._grad_hidden.result(), *self._parameters.results())


def _received(projected: Projected, exchange: Exchange) -> tuple[Projected, RowStats]:
    assert projected.part is not None
    stats = exchange.result(in_batch(projected.part))
    return projected, RowStats._make(stat[0] for stat in stats)
