"""The GEMMs of an LM head on the tensor cores of a GPU: 16-bit operands, float32 results."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastrl.ops._head.whole_rows import WholeRows

_HALVES = (torch.bfloat16, torch.float16)
#: Devices for which torch has no product of 16-bit matrices with a float32 result.
_WITHOUT = ("cpu",)


def gemm_dtype(hidden: Tensor, weight: Tensor, backend: str) -> torch.dtype | None:
    """Return the 16-bit dtype in which a GPU multiplies, or None for the dtype of the results.

    It is the dtype of autocast, else the common dtype of hidden states and weight. On a CPU
    autocast has no effect, and the reference backend never rounds an operand.
    """
    device = hidden.device.type
    if device in _WITHOUT or backend not in ("triton", "cuda"):
        return None
    if torch.float64 in (hidden.dtype, weight.dtype):
        return None
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return dtype if dtype in _HALVES else None
    return weight.dtype if hidden.dtype == weight.dtype and weight.dtype in _HALVES else None


@functools.cache
def multiply_bfloat16(device: torch.device) -> bool:
    """Return whether a GPU multiplies bfloat16 matrices, as NVIDIA's do from sm_80 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


class TensorCoreProducts(WholeRows):
    """16-bit operands, converted once per call, and float32 results.

    dL/dlogits is bfloat16 even for float16 operands, because the range of float16 is too narrow, so
    the gradients of float16 operands are products of bfloat16 copies.
    """

    #: the dtype of the gradient that replaces float32 logits
    narrow = True

    def __init__(self, weight: Tensor, operand_dtype: torch.dtype) -> None:
        """Multiply with `weight` `[V, H]` of any dtype; `operand_dtype`: bfloat16 or float16."""
        #: the dtype of the hidden states
        self.operand_dtype = operand_dtype
        self._given, self._weight = weight, weight.to(operand_dtype)

    @functools.cached_property
    def _weight_of_gradient(self) -> Tensor:
        same = self.operand_dtype == torch.bfloat16
        return self._weight if same else self._given.to(torch.bfloat16)

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write `[C, V]` from hidden states `[C, H]`."""
        torch.mm(hidden, self._weight.t(), out_dtype=torch.float32, out=out)

    def hidden_gradient(self, grad_logits: Tensor, out: Tensor) -> None:
        """Write `[C, H]`."""
        torch.mm(grad_logits, self._weight_of_gradient, out_dtype=torch.float32, out=out)

    def weight_gradient(
        self, grad_logits: Tensor, hidden: Tensor, total: Tensor, *, accumulate: bool
    ) -> None:
        """Add to `[V, H]` if `accumulate`, else overwrite it."""
        if accumulate:
            self.add_product(total, grad_logits.t(), hidden)
        else:
            operand = hidden.to(torch.bfloat16)
            torch.mm(grad_logits.t(), operand, out_dtype=torch.float32, out=total)

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Add the product of two matrices, rounded to bfloat16."""
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
