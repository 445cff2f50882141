"""The order in which the rows of a call are processed, and the sizes of their chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.ops._head.head import LinearHead
from fastrl.ops._head.projection import row_stride
from fastrl.ops._lens.kept import WHOLE_ROW, KeptRows, similar
from fastrl.ops._vocabulary_parts.parts import VocabularyParts

#: Most bytes of logits in a chunk on a CPU.
_CPU_CHUNK_BYTES = 192 * 2**20
#: Bytes that kernels and torch allocate beside a chunk on a GPU.
_GPU_BESIDE_BYTES = 4 * 2**20
#: Most bytes of a chunk on a GPU, unless more do not raise the peak: logits, copies and gradients
#: of hidden states.
_GPU_CHUNK_BYTES = 512 * 2**20 - _GPU_BESIDE_BYTES
#: A GEMM on a GPU works on tiles of this many rows or more.
_GPU_TILE = 64


class RowOrder(NamedTuple):
    """The rows of a call, in the order in which they are processed.

    Rows that may have a gradient come first, then rows that need only statistics.
    """

    indices: Tensor | None  # None: all rows, in their own order
    with_gradient: int
    others: int
    #: numbers of kept tokens, rising in both groups; None: all rows have the whole vocabulary
    widths: list[int] | None = None

    def without_others(self) -> RowOrder:
        """Return the rows that may have a gradient."""
        return self._replace(others=0)

    def of(self, values: Tensor) -> Tensor:
        """Return values of all rows in this order for the processed ones, packed `[1, M]`."""
        values = values.reshape(1, -1)
        return values if self.indices is None else values[:, self.indices]

    def pieces(self, start: int, count: int) -> Iterator[tuple[slice, int | None]]:
        """Split rows wherever they kept many more tokens; yield each piece with its width.

        A width of None is the whole vocabulary.
        """
        if self.widths is None:
            yield slice(start, start + count), None
            return
        for rows in similar(self.widths, start, count):
            yield rows, self.width(rows)

    def width(self, rows: slice) -> int | None:
        """Return the most tokens kept by rows of a piece; None is the whole vocabulary."""
        if self.widths is None:
            return None
        width = self.widths[rows.stop - 1]
        return None if width == WHOLE_ROW else width


def order_rows(
    active: Tensor, may_flow: Tensor, *, compact: bool, kept: KeptRows | None = None
) -> RowOrder:
    """Order the rows `[N]` without inactive ones. Without `compact` all may have a gradient.

    On a GPU this is the only synchronization of a call, so a captured graph processes all rows.
    Rows that kept a part of the vocabulary are always ordered by the size of this part.
    """
    on_gpu = active.is_cuda and torch.cuda.is_initialized()  # fake tensors need no driver
    captured = on_gpu and torch.cuda.is_current_stream_capturing()
    if kept is not None and captured:
        raise ValueError("kept must be None while a CUDA graph is captured: the host reads it")
    if kept is None and (captured or not compact):
        return RowOrder(None, active.shape[0], 0)
    flowing = may_flow if compact else torch.ones_like(may_flow)
    kind = torch.where(active, torch.where(flowing, 0, 1), 2)
    if kept is None:
        order = kind.argsort(stable=True)
    else:
        widths = kept.widths()
        order = (kind * (WHOLE_ROW + 1) + widths).argsort(stable=True)
    first, both = torch.stack([(kind == 0).sum(), (kind <= 1).sum()]).tolist()
    indices = order[:both]
    ordered = None if kept is None else widths[indices].tolist()
    return RowOrder(indices, first, both - first, ordered)


def chunk_size(
    chunk_tokens: int | None,
    head: LinearHead,
    parts: VocabularyParts,
    buffers: int,
    teacher: LinearHead | None = None,
    *,
    on_gpu: bool,
    weight_trained: bool = False,
) -> int:
    """Return the number of rows in a chunk: `chunk_tokens`, or a default.

    The number covers the rows in all `buffers`, and is the same on all ranks of a split vocabulary.
    It does not cover the logits of a teacher's head.
    """
    vocabulary = head.vocabulary
    if parts.split():  # a GPU fills its memory with its part; a CPU gains nothing from more rows
        vocabulary = max(parts.sizes) if on_gpu else sum(parts.sizes)
    limit = _GPU_CHUNK_BYTES
    if weight_trained and not parts.split():  # the ranks' parts may have different sizes
        limit = max(limit, head.rounded_gradient_bytes() - _GPU_BESIDE_BYTES)
    rows = chunk_tokens or _default_rows(head, teacher, vocabulary, limit, on_gpu=on_gpu)
    tile = _GPU_TILE if chunk_tokens is None and on_gpu and rows >= buffers * _GPU_TILE else 1
    return max(1, rows // (buffers * tile) * tile)


def _default_rows(
    head: LinearHead, teacher: LinearHead | None, vocabulary: int, limit: int, *, on_gpu: bool
) -> int:
    """Return how many rows of logits exist at once.

    On a CPU the logits of a chunk and a block of converted weights take less than 256 MiB. On a GPU
    every chunk reads and writes the accumulated weight gradient once, which only many rows
    amortize; the logits of a chunk, and the copies and gradients of its hidden states, take at most
    `limit` bytes. They are freed before the copy of a 16-bit weight's gradient is allocated, so
    they do not add to the peak up to its size.
    """
    if on_gpu:
        width, wide = head.weight.shape[1], head.dtype.itemsize
        # hidden states as operands, and their gradient, which is converted; with LoRA both whole
        of_states = 2 * wide + (2 if head.lora_a is None else 2 + wide)
        row_bytes = row_stride(vocabulary, on_gpu=True) * wide + width * of_states
        if teacher is not None:
            row_bytes += row_stride(vocabulary, on_gpu=True) * wide
            row_bytes += teacher.weight.shape[1] * 2 * wide
        rows = limit // row_bytes
        return max(1, rows // _GPU_TILE * _GPU_TILE or rows)
    sides = 1 if teacher is None else 2
    rows = _CPU_CHUNK_BYTES // (sides * vocabulary * head.dtype.itemsize)
    return max(16, min(rows, 4096))


def chunks(start: int, count: int, size: int, *, on_gpu: bool) -> Iterator[slice]:
    """Yield the rows from `start` on in chunks of about equal sizes, of at most `size` rows.

    GEMMs are inefficient on a short last chunk and on partial tiles.
    """
    number = -(-count // size)
    tile = _GPU_TILE if on_gpu and size % _GPU_TILE == 0 else 1
    tiles = -(-count // tile)
    for i in range(number):
        first, end = (min(j * tiles // number * tile, count) for j in (i, i + 1))
        yield slice(start + first, start + end)
