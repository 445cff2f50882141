"""The three GEMMs of an LM head, with float32 results for operands of any dtype.

    logits = hidden weight^T,   d hidden = d logits weight,   d weight += d logits^T hidden

The implementation is chosen once per call by backend, device and dtype. On a CPU torch rounds the
product of 16-bit matrices to 16 bits, too coarse for log-probabilities; there, operands are
converted block by block, or multiplied by fastrl's kernel for AMX tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastrl import native

#: Bytes of a converted block of weights.
_BLOCK_BYTES = 16 * 2**20


class ConvertedProducts:
    """Operands converted to the dtype of the results: float32, or float64 if one is float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of the results."""
        self.dtype = dtype
        #: of the hidden states
        self.operand_dtype = dtype

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write `[C, V]` from hidden states `[C, H]`."""
        for columns, block in self._blocks(weight):
            torch.mm(hidden, block.t(), out=out[:, columns])

    def gradient_operand(self, grad_logits: Tensor) -> Tensor:
        """Convert dL/dlogits for the two GEMMs below, possibly in place."""
        return grad_logits

    def hidden_gradient(self, grad_logits: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write `[C, H]`."""
        out.zero_()
        for columns, block in self._blocks(weight):
            out.addmm_(grad_logits[:, columns], block)

    def weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, total: Tensor, *, accumulate: bool
    ) -> None:
        """Add to `[V, H]` if `accumulate`, else overwrite it."""
        total.addmm_(grad_logits.t(), hidden, beta=float(accumulate))

    def _blocks(self, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the weight in the dtype of the results, in blocks if it must be converted."""
        if weight.dtype == self.dtype:
            yield slice(None), weight
            return
        vocabulary, width = weight.shape
        rows = max(64, _BLOCK_BYTES // (width * self.dtype.itemsize))
        buffer = weight.new_empty((min(rows, vocabulary), width), dtype=self.dtype)
        for start in range(0, vocabulary, rows):
            columns = slice(start, min(start + rows, vocabulary))
            yield columns, buffer[: columns.stop - start].copy_(weight[columns])


class TileProducts(ConvertedProducts):
    """bfloat16 on the AMX tiles of a CPU; dL/dlogits is split into the sum of two bfloat16."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.operand_dtype = torch.bfloat16

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write `[C, V]` from hidden states `[C, H]`."""
        torch.ops.fastrl.mixed_matmul_(out, hidden, weight.t(), False)

    def hidden_gradient(self, grad_logits: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write `[C, H]`."""
        torch.ops.fastrl.mixed_matmul_(out, grad_logits, weight, False)

    def weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, total: Tensor, *, accumulate: bool
    ) -> None:
        """Add to `[V, H]` if `accumulate`, else overwrite it."""
        torch.ops.fastrl.mixed_matmul_(total, grad_logits.t(), hidden, accumulate)


class TensorCoreProducts(ConvertedProducts):
    """16-bit operands and float32 results on a GPU; dL/dlogits is rounded to bfloat16."""

    def __init__(self, operand_dtype: torch.dtype) -> None:
        super().__init__(torch.float32)
        self.operand_dtype = operand_dtype

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write `[C, V]` from hidden states `[C, H]`."""
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)

    def gradient_operand(self, grad_logits: Tensor) -> Tensor:
        """Round dL/dlogits to bfloat16, in the same memory."""
        return narrowed(grad_logits, torch.bfloat16)

    def hidden_gradient(self, grad_logits: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write `[C, H]`."""
        torch.mm(grad_logits, weight, out_dtype=torch.float32, out=out)

    def weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, total: Tensor, *, accumulate: bool
    ) -> None:
        """Add to `[V, H]` if `accumulate`, else overwrite it."""
        if accumulate:
            torch.addmm(total, grad_logits.t(), hidden, out_dtype=torch.float32, out=total)
        else:
            torch.mm(grad_logits.t(), hidden, out_dtype=torch.float32, out=total)


def narrowed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a float32 matrix to a 16-bit dtype, each row in the first half of its memory.

    Columns j to 2j are written where columns j/2 to j were, which have already been moved.
    """
    narrow = matrix.view(dtype)[:, : matrix.shape[1]]
    narrow[:, :1] = matrix[:, :1].clone()
    start = 1
    while start < matrix.shape[1]:
        narrow[:, start : 2 * start] = matrix[:, start : 2 * start]
        start *= 2
    return narrow


def choose_products(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, backend: str
) -> ConvertedProducts:
    """Return the GEMMs for a call; float16 uses the float32 GEMMs, as gradients could underflow."""
    is_bfloat16 = hidden.dtype == weight.dtype == torch.bfloat16
    # mixed_matmul_ needs stride 1 in one of the dimensions
    if backend == "cpu" and is_bfloat16 and 1 in weight.stride() and native.has_matrix_tiles():
        return TileProducts()
    if backend in ("triton", "cuda") and is_bfloat16 and hidden.device.type == "cuda":
        return TensorCoreProducts(torch.bfloat16)
    return ConvertedProducts(dtype)
