"""Chunks of rows in a linear form: their rows, their statistics and their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import RowArguments, RowStats
from fastrl.library import called, operators
from fastrl.ops._kept.rows import WHOLE_ROW, KeptRows, similar
from fastrl.ops._linear.head import LinearHead
from fastrl.ops._vocabulary_parts.parts import VocabularyParts
from fastrl.ops._vocabulary_parts.statistics import PartRows, write_part_gradient

#: Most bytes of logits in a chunk on a CPU.
_CPU_CHUNK_BYTES = 192 * 2**20
#: Bytes that kernels and torch allocate beside a chunk on a GPU.
_GPU_BESIDE_BYTES = 4 * 2**20
#: Most bytes of a chunk on a GPU, unless more do not raise the peak: logits, copies and gradients
#: of hidden states.
_GPU_CHUNK_BYTES = 512 * 2**20 - _GPU_BESIDE_BYTES
#: A GEMM on a GPU works on tiles of this many rows or more.
_GPU_TILE = 64
#: Rows of logits on a GPU start at multiples of this many elements: 16 bytes in bfloat16.
_GPU_ALIGNMENT = 8


def take_rows(rows: RowArguments, chunk: Tensor | slice) -> RowArguments:
    """Index rows `[N]`."""
    return rows._replace(
        token_ids=rows.token_ids[chunk],
        mask=None if rows.mask is None else rows.mask[chunk],
        temperatures=None if rows.temperatures is None else rows.temperatures[chunk],
    )


def flat_rows(rows: RowArguments) -> RowArguments:
    """Reshape rows `[B, T]` to `[N]`."""
    return rows._replace(
        token_ids=rows.token_ids.reshape(-1),
        mask=None if rows.mask is None else rows.mask.reshape(-1),
        temperatures=None if rows.temperatures is None else rows.temperatures.reshape(-1),
    )


def as_batch(rows: RowArguments) -> RowArguments:
    """Reshape rows `[C]` to `[1, C]`, as the operators on logits take them."""
    return rows._replace(
        token_ids=rows.token_ids[None],
        mask=None if rows.mask is None else rows.mask[None],
        temperatures=None if rows.temperatures is None else rows.temperatures[None],
    )


def in_batch(part: PartRows) -> PartRows:
    """Reshape rows `[C]` of a part to `[1, C]`."""
    return PartRows(as_batch(part.rows), part.own[None], part.known[None])


class RowOrder(NamedTuple):
    """The rows of a call, in the order in which they are processed.

    Rows that may have a gradient come first, then rows that need only statistics.
    """

    indices: Tensor | None  # None: all rows, in their own order
    trained: int
    scored: int
    #: numbers of kept tokens, rising in both groups; None: all rows have the whole vocabulary
    widths: list[int] | None = None

    def of(self, values: Tensor) -> Tensor:
        """Return the values `[N]` of all rows in this order, for the processed rows."""
        return values if self.indices is None else values[self.indices]

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
    """Order the rows `[N]` without inactive ones. Without `compact`, all rows are trained.

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
    trained, both = torch.stack([(kind == 0).sum(), (kind <= 1).sum()]).tolist()
    indices = order[:both]
    ordered = None if kept is None else widths[indices].tolist()
    return RowOrder(indices, trained, both - trained, ordered)


def row_stride(vocabulary: int, *, on_gpu: bool) -> int:
    """Return the stride of the rows in a chunk's logits, in elements."""
    return -(-vocabulary // _GPU_ALIGNMENT) * _GPU_ALIGNMENT if on_gpu else vocabulary


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


def chunk_stats(logits: Tensor, rows: RowArguments, backend: str) -> RowStats:
    """Return the statistics of a chunk's rows of whole logits `[C, V]`, `[C]` each."""
    if backend == "reference":
        batch = as_batch(rows)
        outputs = reference.token_stats(logits[None], batch, _active(batch))
        return RowStats._make(output[0] for output in outputs)
    forward = operators(backend).token_stats_fwd
    outputs = called(forward, logits[None], *as_batch(rows), True, True)
    return RowStats._make(output[0] for output in outputs)


def write_chunk_gradient(
    logits: Tensor,
    rows: RowArguments,
    stats: RowStats,
    grads: Sequence[Tensor | None],
    backend: str,
    *,
    narrow: bool,
    part: PartRows | None = None,
) -> None:
    """Overwrite the logits `[C, V]` with dL/dlogits.

    The upstream gradients `grads` belong to logprobs, entropy and logsumexp. With `narrow` the
    result is bfloat16 in the second half of each row, see `fastrl/library.py`. `part` has the rows
    `[C]` of this part of a split vocabulary.
    """
    if part is not None:
        batch = in_batch(part)
        whole = RowStats._make(stat[None] for stat in stats)
        slopes = [None if grad is None else grad[None] for grad in grads]
        write_part_gradient(logits[None], batch, whole, slopes, backend, narrow=narrow)
        return
    if backend == "reference":
        chunk, whole = as_batch(rows), RowStats._make(stat[None] for stat in stats)
        slopes = [None if grad is None else grad[None] for grad in grads]
        reference.token_gradient(logits[None], chunk, _active(chunk), whole, slopes, overwrite=True)
        return
    operators(backend).token_stats_bwd_(
        logits[None],
        *as_batch(rows),
        stats.row_max[None],
        stats.log_sum[None],
        stats.entropy[None],
        *(None if grad is None else grad[None].contiguous() for grad in grads),
        narrow,
    )


def _active(rows: RowArguments) -> Tensor:
    active = rows.token_ids != rows.ignore_index
    return active if rows.mask is None else active & rows.mask


def gradient_of(logits: Tensor, *, narrow: bool) -> Tensor:
    """Return dL/dlogits `[C, V]` that an operator has written over the logits of a chunk."""
    if not narrow:
        return logits
    count, vocabulary, stride = *logits.shape, logits.stride(0)
    memory = logits.as_strided((count, stride), (stride, 1)).view(torch.bfloat16)
    return memory[:, stride : stride + vocabulary]


def compact_rows(logits: Tensor, has_gradient: Tensor) -> tuple[Tensor, Tensor]:
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
