"""Detection of `torch.compile`, `make_fx`, fake tensors and `torch.func` transforms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def is_traced(value: Tensor) -> bool:
    """Return whether a tensor has no values yet: compiled, exported, fake or in `make_fx`."""
    return (
        torch.compiler.is_compiling()
        or isinstance(value, FakeTensor)
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or get_proxy_mode() is not None
        or is_transformed()
    )


def refuse_transforms(function: str) -> None:
    """Raise inside `torch.func.grad`, `vmap`, `jvp` etc., which have no rules for these gradients.

    Raises:
        RuntimeError: the call is inside a transform.
    """
    if is_transformed():
        raise RuntimeError(
            f"{function} cannot be transformed by torch.func (grad, vmap, jvp, ...), which has no "
            "rule for a gradient that a function computes itself; use backward() or "
            "torch.autograd.grad, and a batch instead of vmap (token_logprobs and token_stats also "
            "have backend='reference')"
        )


def is_transformed() -> bool:
    """Return whether the call is inside a transform of `torch.func`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# torch.compile must evaluate this while tracing, inside the transforms of the traced code.
# `torch.compiler.assume_constant_result` sets the same mark but imports torch._dynamo, which takes
# a second.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]
