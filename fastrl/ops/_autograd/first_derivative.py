"""A guard against second derivatives for every backward in fastrl."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward raise under `create_graph=True`.

    `torch.autograd.function.once_differentiable` raises only if the second derivative depends on
    the upstream gradient; if it depends on saved tensors alone, the result is silently a constant.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise RuntimeError(
                "fastrl has first derivatives only: this backward was called with create_graph=True"
            )
        return backward(ctx, *grads)

    return guarded
