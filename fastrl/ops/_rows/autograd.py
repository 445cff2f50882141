"""The derivative of all statistics of rows, from one kernel or from a loop over the rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.contract import CenteringStats, RowArguments, RowStats
from fastrl.library import called, operators
from fastrl.ops._arguments import RowInputs, flat, split_tensors
from fastrl.ops._autograd.first_derivative import first_derivative_only
from fastrl.ops._autograd.saved_tensors import save, saved
from fastrl.ops._rows.operators import rows_stats_bwd, rows_stats_bwd_, rows_stats_fwd
from fastrl.ops._rows.statistics import (
    OF_ROW,
    TokenStats,
    public_stats,
    slopes_of,
    without_gradient,
)


class KernelCall(NamedTuple):
    """Rows of given logits over a whole vocabulary without a teacher, for a single kernel."""

    rows: RowArguments
    with_entropy: bool
    with_sum_sq_probs: bool
    backend: str


def differentiable_stats(
    call: KernelCall | RowInputs, *trainable: Tensor | None, overwrite: bool = False
) -> tuple[TokenStats, CenteringStats | None]:
    """Return all statistics, `[B, T]`; those of a teacher are None without one.

    The sampler's come last, of which the term is differentiable. `trainable` has the logits, or
    hidden states and parameters, which take the place of those in `call`. `overwrite` lets the
    gradient of logits take their place.
    """
    found = _RowStats.apply(call, overwrite, *trainable)  # type: ignore[no-untyped-call]
    if isinstance(call, KernelCall) or not call.sampler.given():
        return TokenStats(*found), None
    count = len(CenteringStats._fields)
    return TokenStats(*found[:-count]), CenteringStats._make(found[-count:])


class _RowStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: KernelCall | RowInputs, overwrite: bool, *trainable: Tensor | None
    ) -> tuple[Tensor, ...]:
        of_teacher: list[Tensor] = []
        comparison: list[Tensor] = []
        of_sampler: list[Tensor] = []
        if isinstance(call, KernelCall):
            arguments: list[Any] = [trainable[0], *call.rows]
            forward = operators(call.backend).token_stats_fwd
            stats = RowStats._make(
                called(forward, *arguments, call.with_entropy, call.with_sum_sq_probs)
            )
        else:
            arguments = flat(call._replace(source=call.source.with_trainable(trainable)))
            *of_rows, of_teacher, comparison, of_sampler = rows_stats_fwd(*arguments)
            stats = RowStats._make(of_rows)
        results = (*public_stats(stats), *of_teacher, *of_sampler)
        if not any(ctx.needs_input_grad):
            return results
        tensors, ctx.others = split_tensors(arguments)
        save(ctx, *tensors, *stats.of_softmax(), *comparison)
        ctx.kernels_of = call.backend if isinstance(call, KernelCall) else None
        ctx.overwrite, ctx.has = overwrite, (len(of_teacher) > 0, len(of_sampler) > 0)
        constants = (*of_teacher[1:], *of_sampler[1:])
        ctx.mark_non_differentiable(*without_gradient(stats), *constants)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, others, needs = saved(ctx), ctx.others, ctx.needs_input_grad[2:]
        arguments = [other if x is None else x for x, other in zip(tensors, others, strict=False)]
        stats, comparison = tensors[len(others) :][:3], tensors[len(others) + 3 :]
        of_rows, of_companions = grads[: len(OF_ROW)], grads[len(OF_ROW) :]
        slopes = [None if x is None else x.contiguous() for x in slopes_of(of_rows)]
        # the first fields of a `Source`, or the logits alone
        logits, trainable = arguments[0], arguments[:1] if len(needs) == 1 else arguments[1:6]
        arguments += [*stats, *slopes]
        kernels = None if ctx.kernels_of is None else operators(ctx.kernels_of)
        if kernels is None:
            has_teacher, has_sampler = ctx.has
            of_divergence = of_companions[0] if has_teacher else None
            of_score = of_companions[-len(CenteringStats._fields)] if has_sampler else None
            arguments += [comparison, of_divergence, of_score, [*needs]]
        if ctx.overwrite and not torch.compiler.is_compiling():
            if kernels is None:
                rows_stats_bwd_(*arguments)
            else:
                kernels.token_stats_bwd_(*arguments, False)
            # makes autograd raise if another node has saved the logits
            torch.autograd.graph.increment_version(logits)
            gradients = [logits.detach()]
        elif kernels is None:
            gradients = rows_stats_bwd(*arguments)
        else:
            gradients = [kernels.token_stats_bwd(*arguments)]
        remaining = iter(gradients)
        pairs = zip(trainable, needs, strict=True)
        return (None, None, *[next(remaining).to(x.dtype) if need else None for x, need in pairs])
