"""Logits of chunks of hidden states, in memory that the chunks share."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import native
from fastrl.ops._arguments import Source
from fastrl.ops._head.head import LinearHead, Products
from fastrl.ops._head.kept_products import GemmKeptProducts, KeptProducts, widest
from fastrl.ops._head.products import choose_products
from fastrl.ops._vocabulary_parts.parts import VocabularyParts

#: Rows of logits on a GPU start at multiples of this many elements: 16 bytes in bfloat16.
_GPU_ALIGNMENT = 8


def row_stride(vocabulary: int, *, on_gpu: bool) -> int:
    """Return the stride of the rows in a chunk's logits, in elements."""
    return -(-vocabulary // _GPU_ALIGNMENT) * _GPU_ALIGNMENT if on_gpu else vocabulary


def head_of(source: Source, dtype: torch.dtype) -> LinearHead | None:
    """Return the LM head with logits in `dtype`, or None for given logits."""
    if source.weight is None:
        return None
    parameters = (source.weight, source.bias, source.lora_a, source.lora_b)
    return LinearHead(*parameters, source.lora_scale, dtype)


def gradient_of(logits: Tensor, *, narrow: bool) -> Tensor:
    """Return dL/dlogits `[C, V]` that an operator has written over the logits of a chunk."""
    if not narrow:
        return logits
    count, vocabulary, stride = *logits.shape, logits.stride(0)
    memory = logits.as_strided((count, stride), (stride, 1)).view(torch.bfloat16)
    return memory[:, stride : stride + vocabulary]


class Projected(NamedTuple):
    """The logits of a chunk, and the operands and products that they are made of."""

    products: Products
    states: Tensor  # [C, H]
    logits: Tensor  # [C, V], or the kept columns [C, K]

    def taken(self, rows: Tensor, logits: Tensor) -> Projected:
        """Return some rows of the chunk, with these logits."""
        return Projected(self.products.taken(rows), self.states[rows], logits)


class Projection:
    """The hidden states and the head of a call; a chunk overwrites the one before it."""

    def __init__(
        self, source: Source, dtype: torch.dtype, backend: str, parts: VocabularyParts
    ) -> None:
        """Choose the products for logits in `dtype`."""
        head = head_of(source, dtype)
        assert source.hidden is not None
        assert head is not None
        self.hidden, self.head = source.hidden, head
        self._backend, self._on_gpu = backend, backend in ("triton", "cuda")
        self._products = choose_products(
            source.hidden, head.weight, dtype, backend, source.operand_dtype
        )
        #: number of kept tokens from which on a row is multiplied with the whole vocabulary
        self._widest = widest(head.vocabulary, self._products, parts, on_gpu=self._on_gpu)

    def by_gemm(self, width: int | None) -> bool:
        """Return whether rows with so many kept tokens are multiplied with the whole vocabulary."""
        return width is None or width >= self._widest

    def allocate(self, rows: int, number: int = 1) -> None:
        """Allocate memory for so many chunks of rows, which take turns."""
        hidden, dtype = self.hidden, self._products.operand_dtype
        stride = row_stride(self.head.vocabulary, on_gpu=self._on_gpu)
        # a list: a generator would refer to self, and only the cyclic collector could free it
        self._buffers = itertools.cycle(
            [
                (
                    native.new_large(hidden, (rows, stride), self.head.dtype),
                    hidden.new_empty((rows, hidden.shape[1]), dtype=dtype),
                )
                for _ in range(number)
            ]
        )

    def project(
        self,
        rows: slice | Tensor,
        width: int | None,
        ids: Tensor | None,
        active: Tensor | None = None,
    ) -> Projected:
        """Compute the logits of rows; `ids` `[C, K]` are their kept columns, padded with -1.

        If `active` is given, all other states count as 0.
        """
        hidden, head = self.hidden[rows], self.head
        states = logits = hidden
        if self.by_gemm(width):
            of_logits, of_states = next(self._buffers)
            states = of_states[: hidden.shape[0]].copy_(hidden)
            logits = of_logits[: hidden.shape[0], : head.vocabulary]
        if active is not None:  # 0 * NaN would reach the weight
            states.masked_fill_(~active[:, None], 0.0)
        products: Products = self._products
        if ids is not None:
            products = KeptProducts(head.weight, head.dtype, ids, self._backend)
            if self.by_gemm(width):
                products = GemmKeptProducts(self._products, logits, products)
            logits = hidden.new_empty(ids.shape, dtype=head.dtype)
        head.project(products, states, logits)
        return Projected(products, states, logits)

    def free(self) -> None:
        """Free the memory of the chunks, of which the caller must drop the last one."""
        del self._buffers
