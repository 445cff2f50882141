"""Losses whose gradient is computed in the forward; the backward only scales it.

On a GPU the host does not read the upstream factor, because that would take a synchronization. A
kernel of the backend reads it, and leaves the gradient alone if it is 1. Any other factor costs
another read and write of the gradient, and so does every factor in a compiled or retained graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastrl.library import operators
from fastrl.ops._autograd.first_derivative import first_derivative_only
from fastrl.segments import segments_of
from fastrl.tracing import is_traced


def with_gradients(
    loss: Tensor, gradients: Sequence[tuple[Tensor | None, Tensor | None]], backend: str
) -> Tensor:
    """Attach gradients to a loss, given as pairs of a tensor and dL/d(tensor).

    A gradient may share memory with its tensor, and may have a wider dtype until the backward.
    """
    tensors, grads, cast_back = [], [], False
    for x, grad in gradients:
        # in forward mode the function raises instead of losing the tangent
        if x is not None and grad is not None and (x.requires_grad or forward_mode()):
            tensors.append(x)
            grads.append(grad)
            cast_back = cast_back or grad.dtype != x.dtype
    if not tensors:
        return loss
    return cast("Tensor", _KnownGradients.apply(loss, cast_back, backend, *tensors, *grads))  # type: ignore[no-untyped-call]


def forward_mode() -> bool:
    """Return whether tensors may have tangents."""
    return forward_ad._current_level >= 0


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, cast_back: bool, backend: str, *pairs: Tensor) -> Tensor:
        tensors, grads = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        ctx.save_for_backward(*grads)
        ctx.backend = backend
        ctx.dtypes = [x.dtype for x in tensors] if cast_back else None
        if torch.compiler.is_compiling():
            return loss.clone()
        ctx.mark_dirty(loss)  # a new tensor of the caller's, so no copy is needed
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = _scaled(ctx.saved_tensors, grad_loss, ctx.backend)
        if ctx.dtypes is not None:
            grads = [grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)]
        return (None, None, None, *grads, *([None] * len(grads)))


def alias_before_overwriting(logits: Tensor) -> Tensor:
    """Return an alias of the logits that receives their gradient after they are overwritten."""
    return cast("Tensor", _Alias.apply(logits))  # type: ignore[no-untyped-call]


def mark_overwritten(logits: Tensor) -> None:
    """Tell autograd that the logits are overwritten: a gradient through any later use raises."""
    _Overwritten.apply(logits)  # type: ignore[no-untyped-call]


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Overwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.mark_dirty(logits)
        ctx.set_materialize_grads(False)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        if grad is not None and bool((grad != 0).any()):
            raise RuntimeError(
                "the logits were modified by an inplace operation: inplace=True overwrote them "
                "with the gradient, and they were used again afterwards"
            )
        return grad


def _scaled(grads: Sequence[Tensor], factor: Tensor, backend: str) -> Sequence[Tensor]:
    """Return grads * factor, in place unless the graph is retained; the factor is not rounded."""
    if is_traced(factor):
        return [(grad * factor[None]).to(grad.dtype) for grad in grads]
    if torch._C._autograd._get_current_graph_task_keep_graph():
        grads = [grad.clone() for grad in grads]
    if _on_gpu(factor) and backend in ("triton", "cuda"):
        return [_scale_on_gpu(grad, factor, backend) for grad in grads]
    if factor.is_cpu and float(factor) == 1.0:
        return grads
    return [grad.mul_(factor) for grad in grads]


def _on_gpu(factor: Tensor) -> bool:
    return factor.is_cuda


def _scale_on_gpu(grad: Tensor, factor: Tensor, backend: str) -> Tensor:
    """Multiply in place, by a kernel that returns at once if the factor is 1."""
    if segments_of(grad) is None:
        return grad.mul_(factor)
    operators(backend).scale_(grad, factor)
    return grad
