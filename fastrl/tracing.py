"""Calls whose tensors have no values to look at, and transforms that no kernel can follow."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def is_traced(value: Tensor) -> bool:
    """Say whether a tensor has no value here: compiled, exported, fake, recorded by `make_fx`."""
    return (
        torch.compiler.is_compiling()
        or isinstance(value, FakeTensor)
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or get_proxy_mode() is not None
        or _transformed()
    )


def refuse_transforms(function: str) -> None:
    """Raise inside `torch.func.grad`, `vmap`, `jvp` and their kin, which go by torch's own rules.

    Raises:
        RuntimeError: a transform is under way.
    """
    if _transformed():
        raise RuntimeError(
            f"{function} cannot be transformed by torch.func (grad, vmap, jvp, ...): its gradient "
            "comes from a kernel; use backward() or torch.autograd.grad, and a batch in place of "
            "vmap (the functions of logits that are no losses also have backend='reference')"
        )


def _transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


# torch.compile asks while it traces, with the transforms of the traced code under way. This is
# `torch.compiler.assume_constant_result` without its import of torch._dynamo, of a second.
_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]
