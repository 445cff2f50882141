"""The rows of a linear call, processed chunk by chunk in the same buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import native
from fastrl.contract import RowArguments, RowStats
from fastrl.library import stored_dtype
from fastrl.ops._linear.call import LinearCall
from fastrl.ops._linear.chunks import (
    RowOrder,
    chunk_size,
    chunk_stats,
    chunks,
    in_batch,
    row_stride,
    take_rows,
)
from fastrl.ops._linear.head import HeadGradients
from fastrl.ops._linear.hidden_gradient import HiddenGradient
from fastrl.ops._linear.products import choose_products
from fastrl.ops._vocabulary_parts.statistics import Exchange, PartRows, part_stats


class LinearGradients(NamedTuple):
    """Gradients of hidden states and parameters, empty if not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    lora_a: Tensor
    lora_b: Tensor


class ChunkBuffer(NamedTuple):
    """Memory for a chunk: its logits, and its hidden states as the GEMMs take them."""

    logits: Tensor
    states: Tensor


class Projected(NamedTuple):
    """A chunk: its hidden states as the GEMMs take them, logits `[C, V]` and row arguments."""

    states: Tensor
    logits: Tensor
    rows: RowArguments
    part: PartRows | None  # the rows of this rank's part of a split vocabulary


class LinearWalk:
    """The rows of a call in their order; a chunk is a slice of it.

    A chunk's logits are overwritten by those of the next one, or of the one after it where the
    vocabulary is split.
    """

    def __init__(
        self, call: LinearCall, order: RowOrder, needs: list[bool], *, exchanging: bool = True
    ) -> None:
        """`needs`: whether hidden, weight, bias, lora_a and lora_b need a gradient.

        `exchanging`: whether statistics are computed, which ranks that split a vocabulary exchange.
        """
        hidden, head = call.hidden, call.head()
        self._hidden, self._head, self._order, self._needs = hidden, head, order, needs
        self._on_gpu = call.on_gpu()
        self._rows = call.rows if order.indices is None else take_rows(call.rows, order.indices)
        self._products = choose_products(
            hidden, head.weight, head.dtype, call.backend, call.operand_dtype
        )
        #: whether dL/dlogits is bfloat16 in the second half of each row
        self.narrow = self._products.narrow
        self._backend, self._parts = call.backend, call.parts
        self._part = None
        if call.parts.split():
            assert self._rows.mask is not None
            self._part = PartRows.of(self._rows, self._rows.mask, call.parts)
        count = order.trained + order.scored
        buffers = 2 if exchanging and call.parts.split() else 1
        size = chunk_size(call.chunk_tokens, head, call.parts, buffers, on_gpu=self._on_gpu)
        self._size = max(1, min(size, count))
        number = sum(-(-rows // self._size) for rows in (order.trained, order.scored))
        self._stride = row_stride(head.vocabulary, on_gpu=self._on_gpu)
        # a list: a generator would refer to self, and only the cyclic collector would free it
        self._buffers = itertools.cycle(
            [self._new_buffer(hidden) for _ in range(max(1, min(buffers, number)))]
        )
        self._parameters = HeadGradients(head, self._products, tuple(needs[1:]))
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
        return chunks(0, self._order.trained, self._size, on_gpu=self._on_gpu)

    def scored(self) -> Iterator[slice]:
        """Yield chunks of the rows of which only the statistics are needed."""
        order = self._order
        return chunks(order.trained, order.scored, self._size, on_gpu=self._on_gpu)

    def with_stats(self, chunks: Iterable[slice]) -> Iterator[tuple[Projected, RowStats]]:
        """Project chunks; yield each with the statistics of its rows.

        Where the vocabulary is split, the ranks exchange theirs while the next chunk is projected,
        or while the caller works on the one before.
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
        indices, buffer = self._order.indices, next(self._buffers)
        hidden = self._hidden[chunk if indices is None else indices[chunk]]
        states = buffer.states[: hidden.shape[0]].copy_(hidden)
        logits = buffer.logits[: hidden.shape[0], : self._head.vocabulary]
        rows = take_rows(self._rows, chunk)
        if indices is None:  # includes masked rows: 0 * NaN would reach the weight
            assert rows.mask is not None
            states.masked_fill_(~rows.mask[:, None], 0.0)
        self._head.project(self._products, states, logits)
        part = None if self._part is None else self._part.taken(chunk)
        return Projected(states, logits, rows, part)

    def gradient(self, logits: Tensor) -> Tensor:
        """Return dL/dlogits, which an operator has written over the logits of a chunk."""
        if not self.narrow:
            return logits
        stride, vocabulary = self._stride, self._head.vocabulary
        memory = logits.as_strided((logits.shape[0], stride), (stride, 1)).view(torch.bfloat16)
        return memory[:, stride : stride + vocabulary]

    def add_gradients(
        self, chunk: slice, grad_logits: Tensor, states: Tensor, kept: Tensor | None = None
    ) -> None:
        """Run the gradient GEMMs of a chunk, or of its rows `kept`."""
        grad_states = torch.empty_like(states, dtype=self._head.dtype) if self._needs[0] else None
        self._parameters.add(grad_logits, states, grad_states)
        if grad_states is not None:
            place: slice | Tensor = chunk
            if self._order.indices is not None:
                place = self._order.indices[chunk]
                place = place if kept is None else place[kept]
            self._grad_hidden.put(place, grad_states)

    def pass_on_nan(self, chunk: slice, logprobs: Tensor) -> None:
        """Let NaN log-probabilities of scored rows reach all gradients.

        The slopes of these rows are 0 times that. They take part in no gradient GEMM.
        """
        nan = torch.where(logprobs.isnan(), torch.nan, 0.0)
        if self._needs[0]:
            assert self._order.indices is not None  # all rows are trained without an order
            place = self._order.indices[chunk]
            self._grad_hidden.put_same(place, nan[:, None])
        before = self._parameters.poison
        self._parameters.poison = nan.sum() if before is None else before + nan.sum()

    def no_stats(self) -> RowStats:
        """Return statistics of 0 for the rows in their order."""
        like, dtype = self._rows.token_ids, self._head.dtype
        stats = RowStats._make(torch.zeros_like(like, dtype=dtype) for _ in RowStats._fields)
        return stats._replace(is_top1=torch.zeros_like(like, dtype=torch.bool))

    def expanded(self, values: Tensor) -> Tensor:
        """Return values in the order of processing for all rows `[N]`, 0 at the others."""
        if self._order.indices is None:
            return values
        result = values.new_zeros(self._hidden.shape[0])
        result[self._order.indices] = values
        return result

    def gradients(self) -> LinearGradients:
        """Return the gradients, accumulated over all chunks."""
        if self._parts.split():
            self._parameters.sum_low_rank_over(self._parts.process_group())
        return LinearGradients(self._grad_hidden.result(), *self._parameters.results())


def _received(projected: Projected, exchange: Exchange) -> tuple[Projected, RowStats]:
    assert projected.part is not None
    stats = exchange.result(in_batch(projected.part))
    return projected, RowStats._make(stat[0] for stat in stats)
