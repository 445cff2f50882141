"""The LM head of the linear forms: its checks, logits and gradients.

Logits are float32 for operands of any dtype (float64 if one is float64), and gradients of
parameters are accumulated in that dtype; `products.py` and `tensor_cores.py` have the GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.checks import floating, is_sharded, number, on_device
from fastrl.library import arithmetic_dtype, stored_dtype
from fastrl.native import new_large
from fastrl.ops._head.kept_products import KeptProducts
from fastrl.ops._head.products import Products as WholeProducts
from fastrl.ops._head.sharded import gathered
from fastrl.ops._vocabulary_parts.parts import group_of, local_part

Products = WholeProducts | KeptProducts


@dataclass(frozen=True)
class LinearHead:
    """logits = hidden weight^T + bias + lora_scale (hidden lora_a^T) lora_b^T."""

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    lora_scale: float
    #: the dtype of logits, sums and accumulated gradients
    dtype: torch.dtype

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary, V."""
        return self.weight.shape[0]

    def rounded_gradient_bytes(self) -> int:
        """Return the bytes of the rounded copy of the weight's gradient, made at the end."""
        stored = stored_dtype(self.weight)
        return 0 if stored == self.dtype else self.weight.numel() * stored.itemsize

    def parameters(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return weight, bias, lora_a, lora_b."""
        return self.weight, self.bias, self.lora_a, self.lora_b

    def project(self, products: Products, hidden: Tensor, logits: Tensor) -> None:
        """Write the logits of hidden states `[C, H]` in `products.operand_dtype`.

        The logits are `[C, V]`, or have the columns of `products`.
        """
        products.logits(hidden, logits)
        if self.lora_a is not None and self.lora_b is not None:
            low_rank = hidden.to(self.dtype) @ self.lora_a.to(self.dtype).t()
            low_rank *= self.lora_scale
            products.add_low_rank(logits, low_rank, self.lora_b)
        if self.bias is not None:
            products.add_bias(logits, self.bias)


class HeadGradients:
    """Gradients of the head's parameters, accumulated over chunks, if they are needed."""

    def __init__(self, head: LinearHead, needs: tuple[bool, ...]) -> None:
        """Allocate them; `needs` has a flag for each of weight, bias, lora_a and lora_b."""
        self._head = head
        self._sums = [
            new_large(parameter, parameter.shape, head.dtype)
            if need and parameter is not None
            else None
            for parameter, need in zip(head.parameters(), needs, strict=True)
        ]
        for total in self._sums[1:]:
            if total is not None:
                total.zero_()
        # the first chunk overwrites the gradient of the weight, so it needs no zeros
        self._weight_written = False
        #: NaN if all gradients must become NaN, else 0
        self.poison: Tensor | None = None

    def add(
        self, products: Products, grad_logits: Tensor, hidden: Tensor, grad_hidden: Tensor | None
    ) -> None:
        """Add the gradients of a chunk from dL/dlogits, which has the columns of `products`.

        The gradient of the hidden states is written to `grad_hidden`, if given.
        """
        weight, bias, *_ = self._sums
        if self.poison is not None:
            hidden = hidden + self.poison
        if bias is not None:
            products.add_bias_gradient(grad_logits, bias)
        if grad_hidden is not None:
            products.hidden_gradient(grad_logits, grad_hidden)
        self._add_lora(products, grad_logits, hidden, grad_hidden)
        if weight is not None:
            products.weight_gradient(grad_logits, hidden, weight, accumulate=self._weight_written)
            self._weight_written = True

    def _add_lora(
        self, products: Products, grad_logits: Tensor, hidden: Tensor, grad_hidden: Tensor | None
    ) -> None:
        """Add a chunk to the gradients of A and B, and their part of `grad_hidden`."""
        head = self._head
        lora_a, lora_b = self._sums[2:]
        if head.lora_a is None or head.lora_b is None:
            return
        a, hidden = head.lora_a.to(head.dtype), hidden.to(head.dtype)
        if lora_b is not None:
            low_rank = (hidden @ a.t()).mul_(head.lora_scale)
            products.add_factor_gradient(grad_logits, low_rank, lora_b)
        if lora_a is None and grad_hidden is None:
            return
        grad_low_rank = hidden.new_zeros((hidden.shape[0], a.shape[0]))
        products.add_low_rank_gradient(grad_logits, head.lora_b, grad_low_rank)
        grad_low_rank *= head.lora_scale
        if lora_a is not None:
            lora_a.addmm_(grad_low_rank.t(), hidden)
        if grad_hidden is not None:
            grad_hidden.addmm_(grad_low_rank, a)

    def sum_low_rank_over(self, group: dist.ProcessGroup) -> None:
        """Sum the gradient of A over the ranks, each of which has a part of the vocabulary."""
        lora_a = self._sums[2]
        if lora_a is not None:
            dist.all_reduce(lora_a, group=group)

    def results(self) -> tuple[Tensor, ...]:
        """Return the gradients in the dtypes of the parameters, empty if not needed.

        For float16 parameters they remain float32: the upstream gradient may still scale them.
        """
        head = self._head
        weight, *small = self._sums
        if weight is not None and not self._weight_written:
            weight.zero_()
            small.append(weight)
        if self.poison is not None:  # the weight gets the NaN from the hidden states of chunks
            for total in small:
                if total is not None:
                    total += self.poison
        return tuple(
            head.weight.new_empty(0)
            if total is None or parameter is None
            else _stored(total, stored_dtype(parameter))
            for total, parameter in zip(self._sums, head.parameters(), strict=True)
        )


def _stored(total: Tensor, dtype: torch.dtype) -> Tensor:
    if total.dtype == dtype:
        return total
    return new_large(total, total.shape, dtype).copy_(total)


def as_head(
    hidden: Tensor,
    weight: object,
    bias: object,
    lora: object,
    group: dist.ProcessGroup | None = None,
) -> LinearHead:
    """Check an LM head, or its part of a split vocabulary, against hidden states `[..., H]`."""

    def parameter(name: str, value: object, *, split: bool = True) -> Tensor:
        if group is None:
            return _gathered(name, value)
        if split:
            group_of(name, value, group, dim=0)
        return floating(name, local_part(value))

    matrix = parameter("weight", weight)
    # an empty part is refused later, on all ranks
    empty = group is None and matrix.shape[:1] == (0,)
    if matrix.dim() != 2 or matrix.shape[1] != hidden.shape[-1] or empty:
        raise ValueError(
            f"weight must have shape [V, {hidden.shape[-1]}] for hidden of shape "
            f"{tuple(hidden.shape)}, got {tuple(matrix.shape)}"
        )
    vocabulary, width = matrix.shape
    offset = None if bias is None else parameter("bias", bias)
    if offset is not None and offset.shape != (vocabulary,):
        raise ValueError(f"bias must have shape ({vocabulary},), got {tuple(offset.shape)}")
    a, b, scale = None, None, 1.0
    if lora is not None:
        if not isinstance(lora, tuple | list) or len(lora) != 3:
            raise TypeError(f"lora must be (A [r, H], B [V, r], scale), got {type(lora).__name__}")
        a, b = parameter("lora[0]", lora[0], split=False), parameter("lora[1]", lora[1])
        scale = number("lora[2]", lora[2])
        if a.dim() != 2 or a.shape[1] != width or b.shape != (vocabulary, a.shape[0]):
            raise ValueError(
                f"lora must be (A [r, {width}], B [{vocabulary}, r], scale), "
                f"got shapes {tuple(a.shape)} and {tuple(b.shape)}"
            )
        if a.shape[0] == 0:
            raise ValueError(f"lora must have a rank r of at least 1, got shape {tuple(a.shape)}")
    for name, value in (("weight", matrix), ("bias", offset), ("lora[0]", a), ("lora[1]", b)):
        if value is not None:
            on_device(name, value, hidden, "hidden")
    return LinearHead(matrix, offset, a, b, scale, arithmetic_dtype(hidden, matrix))


def _gathered(name: str, parameter: object) -> Tensor:
    """Return a full parameter: gather an FSDP2 shard, raise for a partitioned ZeRO-3 parameter."""
    if is_sharded(parameter):
        parameter = gathered(parameter)
    result = floating(name, parameter)
    if result.numel() == 0 and (hasattr(result, "ds_id") or result.dim() == 1):
        raise ValueError(
            f"{name} is empty: ZeRO-3 or FSDP1 has partitioned it; make the call inside "
            "`deepspeed.zero.GatheredParameters(parameter)` or the forward of the model "
            "(`fastrl.integrations.transformers.inside_forward`)"
        )
    return result
