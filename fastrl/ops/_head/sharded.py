"""Parameters that are sharded over ranks: they are gathered for a call, and gradients averaged."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fastrl.ops._autograd.first_derivative import first_derivative_only


def gathered(parameter: Any) -> Tensor:
    """Return the full tensor of a DTensor; its gradient is the mean over the ranks of its mesh.

    Every rank must call this and its backward, as with the layers that FSDP2 gathers, whose
    gradients FSDP2 averages, too. (With `full_tensor()` alone each rank would keep the gradient of
    its local batch.)
    """
    if not (torch.is_grad_enabled() and parameter.requires_grad):
        return cast("Tensor", parameter.full_tensor().detach())
    return cast("Tensor", _Gathered.apply(parameter))  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Tensor:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        return cast("Tensor", parameter.detach().full_tensor())

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        partial = [Partial("sum")] * ctx.mesh.ndim
        total = DTensor.from_local(grad / ctx.mesh.size(), ctx.mesh, partial, run_check=False)
        return total.redistribute(placements=ctx.placements)
