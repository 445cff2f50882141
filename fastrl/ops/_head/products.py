"""The three GEMMs of an LM head, with float32 results for operands of any dtype.

    logits = hidden weight^T,   d hidden = d logits weight,   d weight += d logits^T hidden

The implementation is chosen once per call by backend, device and dtype (`kept_products.py` has that
for rows that kept a part of the vocabulary). On a CPU torch rounds the product of 16-bit matrices
to 16 bits, which is too coarse for log-probabilities, so operands are converted block by block, or
multiplied by fastrl's kernel for AMX tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastrl import native
from fastrl.ops._head.tensor_cores import TensorCoreProducts, multiply_bfloat16
from fastrl.ops._head.whole_rows import WholeRows

#: Bytes of a converted block of weights.
_BLOCK_BYTES = 16 * 2**20


class ConvertedProducts(WholeRows):
    """Operands converted to the dtype of the results: float32, or float64 if one is float64."""

    #: the dtype of dL/dlogits, if it is not that of the logits
    narrow = False

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Multiply with `weight` `[V, H]`, with results in `dtype`."""
        self._weight = weight
        #: the dtype of the hidden states
        self.operand_dtype = self._dtype = dtype

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write `[C, V]` from hidden states `[C, H]`."""
        for columns, block in self._blocks():
            torch.mm(hidden, block.t(), out=out[:, columns])

    def hidden_gradient(self, grad_logits: Tensor, out: Tensor) -> None:
        """Write `[C, H]`."""
        out.zero_()
        for columns, block in self._blocks():
            out.addmm_(grad_logits[:, columns], block)

    def weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, total: Tensor, *, accumulate: bool
    ) -> None:
        """Add to `[V, H]` if `accumulate`, else overwrite it."""
        total.addmm_(grad_logits.t(), hidden, beta=float(accumulate))

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Add the product of two small matrices, or of a small matrix and dL/dlogits."""
        total.addmm_(a.to(self._dtype), b.to(self._dtype))

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the weight in the dtype of the results, in blocks if it must be converted."""
        weight = self._weight
        if weight.dtype == self._dtype:
            yield slice(None), weight
            return
        vocabulary, width = weight.shape
        rows = max(64, _BLOCK_BYTES // (width * self._dtype.itemsize))
        buffer = weight.new_empty((min(rows, vocabulary), width), dtype=self._dtype)
        for start in range(0, vocabulary, rows):
            columns = slice(start, min(start + rows, vocabulary))
            yield columns, buffer[: columns.stop - start].copy_(weight[columns])


class TileProducts(ConvertedProducts):
    """bfloat16 on the AMX tiles of a CPU; dL/dlogits is split into the sum of two bfloat16."""

    def __init__(self, weight: Tensor) -> None:
        """Multiply with `weight`, bfloat16 `[V, H]`."""
        super().__init__(weight, torch.float32)
        self.operand_dtype = torch.bfloat16

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write `[C, V]` from hidden states `[C, H]`."""
        torch.ops.fastrl.mixed_matmul_(out, hidden, self._weight.t(), False)

    def hidden_gradient(self, grad_logits: Tensor, out: Tensor) -> None:
        """Write `[C, H]`."""
        torch.ops.fastrl.mixed_matmul_(out, grad_logits, self._weight, False)

    def weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, total: Tensor, *, accumulate: bool
    ) -> None:
        """Add to `[V, H]` if `accumulate`, else overwrite it."""
        torch.ops.fastrl.mixed_matmul_(total, grad_logits.t(), hidden, accumulate)


Products = ConvertedProducts | TensorCoreProducts


def choose_products(
    hidden: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    backend: str,
    operand_dtype: torch.dtype | None,
) -> Products:
    """Return the GEMMs for results in `dtype` and operands in the result of `gemm_dtype`."""
    if operand_dtype is not None and multiply_bfloat16(hidden.device):
        return TensorCoreProducts(weight, operand_dtype)
    is_bfloat16 = hidden.dtype == weight.dtype == torch.bfloat16
    # mixed_matmul_ needs stride 1 in one of the dimensions
    if backend == "cpu" and is_bfloat16 and 1 in weight.stride() and native.has_matrix_tiles():
        return TileProducts(weight)
    return ConvertedProducts(weight, dtype)
