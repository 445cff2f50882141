"""Losses whose gradient was computed together with them: autograd only has to pass it on."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fastrl.ops.first_derivative import first_derivative_only


def with_slopes(
    loss: Tensor,
    logprobs: Tensor,
    slope: Tensor,
    entropy: Tensor | None = None,
    entropy_slope: Tensor | None = None,
) -> Tensor:
    """Return the loss with gradient `slope` to `logprobs` and `entropy_slope` to `entropy`."""
    return cast(
        "Tensor",
        _Slopes.apply(  # type: ignore[no-untyped-call]
            logprobs, entropy, loss, slope, entropy_slope
        ),
    )


def with_logits_gradient(loss: Tensor, logits: Tensor, grad_logits: Tensor) -> Tensor:
    """Return the loss with gradient `grad_logits` to `logits`; the two may share memory."""
    return cast(
        "Tensor",
        _LogitsGradient.apply(  # type: ignore[no-untyped-call]
            logits, loss, grad_logits
        ),
    )


class _Slopes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        entropy: Tensor | None,
        loss: Tensor,
        slope: Tensor,
        entropy_slope: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(slope, entropy_slope)
        return loss.clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        slope, entropy_slope = ctx.saved_tensors
        grad_logprobs = slope * grad_loss if ctx.needs_input_grad[0] else None
        with_entropy = entropy_slope is not None and ctx.needs_input_grad[1]
        return grad_logprobs, entropy_slope * grad_loss if with_entropy else None, None, None, None


class _LogitsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor, grad_logits: Tensor) -> Tensor:
        ctx.save_for_backward(grad_logits)
        return loss.clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        (grad_logits,) = ctx.saved_tensors
        return _scaled(grad_logits, grad_loss), None, None


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """Return grad * factor, in place where nobody can ask for the gradient again."""
    if torch.compiler.is_compiling():
        return grad * factor.to(grad.dtype)
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return grad * factor
    if factor.device.type == "cpu" and float(factor) == 1.0:
        return grad
    return grad.mul_(factor)
