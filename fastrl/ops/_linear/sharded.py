"""Parameters that lie in parts on several ranks: gathered for a call, their gradient averaged."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fastrl.ops._autograd.first_derivative import first_derivative_only


def gathered(parameter: Any) -> Tensor:
    """Return a DTensor whole; its gradient is the mean over the ranks that it lies on.

    Every rank calls this, and its backward, as it does with the layers that FSDP2 gathers itself;
    the mean is what FSDP2 does with theirs. (`full_tensor()` alone would leave to each rank the
    gradient of its own batch.)
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

        parts = [Partial("sum")] * ctx.mesh.ndim
        total = DTensor.from_local(grad / ctx.mesh.size(), ctx.mesh, parts, run_check=False)
        return total.redistribute(placements=ctx.placements)
