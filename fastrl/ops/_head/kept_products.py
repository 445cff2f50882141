"""The products of an LM head with rows that kept a part of the vocabulary.

    logits[c, k] = states[c] . weight[ids[c, k]],   d states[c] = sum_k d logits[c, k] weight[ids[c, k]]
    d weight[i] = the sum of d logits[c, k] states[c] over ids[c, k] = i

These products read K rows of the weight for each row of the chunk. A GEMM multiplies with all V
rows, but reads each of them once for many rows of the chunk, so it is faster from some K on; the
kept logits are then gathered from all logits.
"""  # noqa: E501

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.library import NAMESPACES
from fastrl.ops._head.products import Products, TileProducts
from fastrl.ops._head.tensor_cores import TensorCoreProducts
from fastrl.ops._vocabulary_parts.parts import VocabularyParts

#: Bytes in memory for a chunk of rows that kept tokens, on a CPU and on a GPU.
_CHUNK_BYTES = (16 * 2**20, 256 * 2**20)
#: Bytes of temporary tensors per column: ids in 32 and 64 bits, logits, comparisons.
_COLUMN_BYTES = 32
#: Elements of gathered rows that exist at once if there are no kernels for these products.
_AT_ONCE = 2**22
# How much faster a GPU multiplies than it reads: a GEMM over V columns takes as long as reading
# V / ratio rows of the weight. On an H100, in 16 bits: 2 V H / (800 Tflop/s) against
# 2 K H bytes / (3.35 TB/s) gives K = V / 239; in float32 (60 Tflop/s) K = V / 36.
_TENSOR_CORE_RATIO, _FLOAT32_RATIO = 256, 32
# On a CPU with AVX-512, K = V / 12 rows of the weight take as long as the GEMM and gathering from
# its logits. The ratio for AMX assumes GEMMs five times as fast, and has not been measured.
_CPU_RATIO, _TILE_RATIO = 12, 64


class KeptProducts:
    """Products with the columns `ids` `[C, K]` of each row; -1 is no column, with logit -inf."""

    #: dL/dlogits has the dtype of the logits
    narrow = False

    def __init__(self, weight: Tensor, dtype: torch.dtype, ids: Tensor, backend: str) -> None:
        """Multiply with rows of `weight` `[V, H]`, with results in `dtype`."""
        self._weight, self._dtype, self._ids, self._backend = weight, dtype, ids, backend

    def taken(self, rows: Tensor) -> KeptProducts:
        """Return the products for some rows of the chunk."""
        return KeptProducts(self._weight, self._dtype, self._ids[rows], self._backend)

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write `[C, K]` from hidden states `[C, H]`."""
        out.zero_().masked_fill_(self._ids < 0, float("-inf"))
        self.add_low_rank(out, hidden, self._weight)

    def hidden_gradient(self, grad_logits: Tensor, out: Tensor) -> None:
        """Write `[C, H]`."""
        self.add_low_rank_gradient(grad_logits, self._weight, out.zero_())

    def weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, total: Tensor, *, accumulate: bool
    ) -> None:
        """Add to `[V, H]` if `accumulate`, else overwrite it."""
        self.add_factor_gradient(grad_logits, hidden, total if accumulate else total.zero_())

    def add_bias(self, logits: Tensor, bias: Tensor) -> None:
        """Add the entries of `[V]`."""
        logits.add_(torch.where(self._ids < 0, 0.0, bias[self._ids.clamp(min=0)]))

    def add_bias_gradient(self, grad_logits: Tensor, total: Tensor) -> None:
        """Add to `[V]`."""
        self.add_factor_gradient(grad_logits, torch.ones_like(grad_logits[:, :1]), total[:, None])

    def add_low_rank(self, logits: Tensor, low_rank: Tensor, factor: Tensor) -> None:
        """Add states `[C, r]` times rows of a factor `[V, r]`."""
        states = self._held(low_rank)
        _call("gathered_dots_", self._backend, logits, states, _row_major(factor), self._ids)

    def add_factor_gradient(self, grad_logits: Tensor, low_rank: Tensor, total: Tensor) -> None:
        """Add to `[V, r]`."""
        states = self._held(low_rank)
        _call("scattered_sums_", self._backend, total, grad_logits, states, self._ids)

    def _held(self, states: Tensor) -> Tensor:
        """Return states as the kernels take them: on a GPU in any dtype."""
        return states if states.is_cuda else states.to(self._dtype)

    def add_low_rank_gradient(self, grad_logits: Tensor, factor: Tensor, total: Tensor) -> None:
        """Add to `[C, r]`."""
        _call("gathered_sums_", self._backend, total, grad_logits, _row_major(factor), self._ids)


class GemmKeptProducts(KeptProducts):
    """The same products by GEMMs of whole rows, for rows that kept much of the vocabulary."""

    def __init__(self, products: Products, all_logits: Tensor, kept: KeptProducts) -> None:
        """Multiply by `products` of whole rows; `all_logits` is memory for logits `[C, V]`."""
        super().__init__(kept._weight, kept._dtype, kept._ids, kept._backend)
        self._products, self._all = products, all_logits
        self._scattered = False

    def taken(self, rows: Tensor) -> GemmKeptProducts:
        """Return the products for some rows of the chunk."""
        return GemmKeptProducts(self._products, self._all[: len(rows)], super().taken(rows))

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write `[C, K]` from hidden states `[C, H]`."""
        self._products.logits(hidden, self._all)
        torch.gather(self._all, 1, self._index(), out=out)
        out.masked_fill_(self._ids < 0, float("-inf"))

    def hidden_gradient(self, grad_logits: Tensor, out: Tensor) -> None:
        """Write `[C, H]`."""
        self._products.hidden_gradient(self._of_all(grad_logits), out)

    def weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, total: Tensor, *, accumulate: bool
    ) -> None:
        """Add to `[V, H]` if `accumulate`, else overwrite it."""
        of_all = self._of_all(grad_logits)
        self._products.weight_gradient(of_all, hidden, total, accumulate=accumulate)

    def _index(self) -> Tensor:
        return self._ids.clamp(min=0).to(torch.int64)

    def _of_all(self, grad_logits: Tensor) -> Tensor:
        """Return dL/dlogits `[C, V]`, in the memory of the logits."""
        result = self._all
        if self._products.narrow:
            result = self._all.view(torch.bfloat16)[:, : self._all.shape[1]]
        if not self._scattered:
            # a column of -1 adds 0 to the first column
            result.zero_().scatter_add_(1, self._index(), grad_logits.to(result.dtype))
            self._scattered = True
        return result


def widest(vocabulary: int, products: Products, parts: VocabularyParts, *, on_gpu: bool) -> int:
    """Return the number of kept tokens from which on a row is multiplied with the whole vocabulary.

    It is the same on all ranks of a split vocabulary, which exchange the same chunks.
    """
    ratio = _CPU_RATIO
    if parts.split():  # their products may differ: not every CPU or stride allows tiles
        vocabulary = max(parts.sizes)
    elif isinstance(products, TileProducts):
        ratio = _TILE_RATIO
    if on_gpu:
        on_tensor_cores = isinstance(products, TensorCoreProducts)
        ratio = _TENSOR_CORE_RATIO if on_tensor_cores else _FLOAT32_RATIO
    return max(1, vocabulary // ratio)


def kept_chunk_size(width: int, features: int, dtype: torch.dtype, *, on_gpu: bool) -> int:
    """Return how many rows with `width` kept tokens, and so many hidden features, a chunk has."""
    row_bytes = _COLUMN_BYTES * width + 3 * features * dtype.itemsize
    return max(1, _CHUNK_BYTES[on_gpu] // row_bytes)


def _row_major(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _call(name: str, backend: str, out: Tensor, *arguments: Tensor) -> None:
    of_kernels = out.is_cuda or all(x.dtype != torch.float64 for x in arguments)
    if backend == "reference" or not of_kernels:
        _REFERENCE[name](out, *arguments)
        return
    space = "triton" if backend == "triton" or out.is_cuda else "cpu"
    getattr(getattr(torch.ops, NAMESPACES[space]), name)(out, *arguments)


def _gathered(matrix: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a matrix `[C, K, H]`, 0 for an id below 0."""
    rows = matrix[ids.clamp(min=0)].to(dtype)
    return torch.where(ids[..., None] < 0, 0.0, rows)


def _by_blocks(ids: Tensor, width: int) -> list[slice]:
    """Return slices of the columns, so that few rows of a matrix are gathered at once."""
    at_once = max(1, _AT_ONCE // max(1, ids.shape[0] * width))
    return [slice(first, first + at_once) for first in range(0, ids.shape[1], at_once)]


def _gathered_dots(out: Tensor, states: Tensor, matrix: Tensor, ids: Tensor) -> None:
    for block in _by_blocks(ids, matrix.shape[1]):
        rows = _gathered(matrix, ids[:, block], out.dtype)
        out[:, block] += torch.einsum("ch,ckh->ck", states.to(out.dtype), rows)


def _gathered_sums(out: Tensor, factors: Tensor, matrix: Tensor, ids: Tensor) -> None:
    for block in _by_blocks(ids, matrix.shape[1]):
        rows = _gathered(matrix, ids[:, block], out.dtype)
        out += torch.einsum("ck,ckh->ch", factors[:, block], rows)


def _scattered_sums(out: Tensor, factors: Tensor, states: Tensor, ids: Tensor) -> None:
    row, column = (ids >= 0).nonzero(as_tuple=True)
    for some in _by_blocks(row[None], states.shape[1]):
        r, c = row[some], column[some]
        out.index_add_(0, ids[r, c].long(), factors[r, c, None] * states[r].to(out.dtype))


_REFERENCE = {
    "gathered_dots_": _gathered_dots,
    "gathered_sums_": _gathered_sums,
    "scattered_sums_": _scattered_sums,
}
