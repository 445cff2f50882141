"""The three GEMMs of an LM head, with float32 results whatever the operands.

    logits = hidden weight^T,   d hidden = d logits weight,   d weight += d logits^T hidden

Which library multiplies is chosen once per call, by device, dtype and what the machine has. torch
rounds what it multiplies in 16 bits to 16 bits on a CPU, which no log-probability survives; so
there the operands are converted block by block, or go to fastrl's own product on matrix tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastrl import native

#: Bytes of a block of weights that is converted at a time.
_BLOCK_BYTES = 16 * 2**20


class ConvertedProducts:
    """Operands in the dtype of the results: float32, or float64 where one of them is."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype` is that of results and sums."""
        self.dtype = dtype
        #: in which hidden states enter
        self.operand_dtype = dtype

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write `[C, V]` from hidden states `[C, H]`."""
        for columns, block in self._blocks(weight):
            torch.mm(hidden, block.t(), out=out[:, columns])

    def gradient_operand(self, grad_logits: Tensor) -> Tensor:
        """Return the gradient of the logits as the two GEMMs below want it; may overwrite it."""
        return grad_logits

    def hidden_gradient(self, grad_logits: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write `[C, H]`."""
        out.zero_()
        for columns, block in self._blocks(weight):
            out.addmm_(grad_logits[:, columns], block)

    def weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, total: Tensor, *, begun: bool
    ) -> None:
        """Add to `[V, H]`, or write it where the sum has not begun."""
        total.addmm_(grad_logits.t(), hidden, beta=float(begun))

    def _blocks(self, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the weight in the dtype of the results, block by block where it is converted."""
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
    """bfloat16 on the matrix tiles of a CPU; the gradient enters as the sum of two bfloat16."""

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
        self, grad_logits: Tensor, hidden: Tensor, total: Tensor, *, begun: bool
    ) -> None:
        """Add to `[V, H]`, or write it where the sum has not begun."""
        torch.ops.fastrl.mixed_matmul_(total, grad_logits.t(), hidden, begun)


class TensorCoreProducts(ConvertedProducts):
    """16-bit operands and float32 results on a GPU; the gradient enters rounded to bfloat16."""

    def __init__(self, operand_dtype: torch.dtype) -> None:
        super().__init__(torch.float32)
        self.operand_dtype = operand_dtype

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write `[C, V]` from hidden states `[C, H]`."""
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)

    def gradient_operand(self, grad_logits: Tensor) -> Tensor:
        """Return the gradient of the logits in bfloat16, in the memory of the float32 one."""
        return narrowed(grad_logits, torch.bfloat16)

    def hidden_gradient(self, grad_logits: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write `[C, H]`."""
        torch.mm(grad_logits, weight, out_dtype=torch.float32, out=out)

    def weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, total: Tensor, *, begun: bool
    ) -> None:
        """Add to `[V, H]`, or write it where the sum has not begun."""
        if begun:
            torch.addmm(total, grad_logits.t(), hidden, out_dtype=torch.float32, out=total)
        else:
            torch.mm(grad_logits.t(), hidden, out_dtype=torch.float32, out=total)


def narrowed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a float32 matrix to a 16-bit dtype, each row into the first half of its own memory.

    Columns j to 2 j land where columns j/2 to j were, which have moved on by then.
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
    """Return how a call multiplies; float16 gradients would underflow, so they stay float32."""
    alike = hidden.dtype == weight.dtype == torch.bfloat16
    # the tiles take a weight by rows or by columns, and no view that skips elements of both
    if backend == "cpu" and alike and 1 in weight.stride() and native.has_matrix_tiles():
        return TileProducts()
    if backend in ("triton", "cuda") and alike and hidden.device.type == "cuda":
        return TensorCoreProducts(torch.bfloat16)
    return ConvertedProducts(dtype)
