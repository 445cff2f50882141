"""The guard that every backward of fastrl carries: there is no second derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward raise under `create_graph=True`.

    `torch.autograd.function.once_differentiable` raises only when the second derivative flows
    through the upstream gradient; where it would flow through saved tensors alone, the result is
    a constant in silence.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise RuntimeError(
                "fastrl has first derivatives only: this backward was asked for a graph of itself "
                "(create_graph=True)"
            )
        return backward(ctx, *grads)

    return guarded
