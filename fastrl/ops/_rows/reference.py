"""Differentiable statistics of rows on the reference backend, which torch.func may transform."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastrl import reference
from fastrl.contract import RowArguments, RowStats, SoftmaxStats
from fastrl.library import arithmetic_dtype
from fastrl.ops._rows.statistics import (
    DIFFERENTIABLE,
    OF_ROW,
    TokenStats,
    public_stats,
    slopes_of,
    without_gradient,
)
from fastrl.tracing import is_traced, is_transformed


def reference_stats(
    logits: Tensor,
    rows: RowArguments,
    *,
    with_entropy: bool,
    with_sum_sq_probs: bool,
    save_probs: bool = False,
) -> TokenStats:
    """Return the statistics, `[B, T]`; the mask of the rows says which are active.

    With `save_probs` the forward saves the probabilities, and the backward makes the gradient from
    them; otherwise it computes them again.
    """
    scalars = rows._replace(token_ids=None, mask=None, temperatures=None)  # type: ignore[arg-type]
    tensors = (logits, rows.token_ids, rows.mask, rows.temperatures)
    inputs = (*tensors, scalars, with_entropy, with_sum_sq_probs)
    if is_transformed() or forward_ad._current_level >= 0:
        stats = _Transformable.apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        save_probs = save_probs and torch.is_grad_enabled() and logits.requires_grad
        stats = _ReferenceStats.apply(*inputs, save_probs and not is_traced(logits))  # type: ignore[no-untyped-call]
    return TokenStats(*public_stats(RowStats._make(stats)))


class _ReferenceStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, *others: Any) -> tuple[Tensor, ...]:
        inputs, save_probs, probs = (logits, *others[:-1]), others[-1], None
        if save_probs:
            probs = logits.new_empty(logits.shape, dtype=arithmetic_dtype(logits, logits))
        output = _stats(probs, *inputs)
        _save(ctx, inputs, output, probs)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradient(ctx, *_slopes(grads)), *([None] * 7)


class _Transformable(torch.autograd.Function):
    """The same with `setup_context`: torch.func needs it, but a small call takes longer."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _stats(None, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs, output, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradient(ctx, *_slopes(grads)), *([None] * 6)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        return _tangents(ctx, tangent)


def _stats(
    probs: Tensor | None,
    logits: Tensor,
    token_ids: Tensor,
    active: Tensor,
    temperatures: Tensor | None,
    scalars: RowArguments,
    with_entropy: bool,
    with_sum_sq_probs: bool,
) -> tuple[Tensor, ...]:
    stats = reference.token_stats(
        logits,
        scalars._replace(token_ids=token_ids, temperatures=temperatures),
        active,
        with_entropy=with_entropy,
        with_sum_sq_probs=with_sum_sq_probs,
        probs=probs,
    )
    return tuple(stats)


def _save(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], probs: Tensor | None
) -> None:
    *tensors, ctx.scalars, _, _ = inputs
    stats = RowStats._make(output)
    saved = (*tensors, stats.row_max, stats.log_sum, stats.entropy, probs)
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)
    ctx.mark_non_differentiable(*without_gradient(stats), stats.row_max)
    ctx.set_materialize_grads(False)


def _slopes(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients of logprobs, entropy and logsumexp.

    A second derivative also comes through the saved log_sum, and is added to that of logsumexp.
    """
    of_logprob, of_entropy, of_logsumexp = slopes_of(grads[: len(OF_ROW)])
    of_log_sum = grads[-1]
    if of_logsumexp is not None and of_log_sum is not None:
        return of_logprob, of_entropy, of_logsumexp + of_log_sum
    return of_logprob, of_entropy, of_log_sum if of_logsumexp is None else of_logsumexp


def _gradient(
    ctx: Any,
    of_logprob: Tensor | None,
    of_entropy: Tensor | None,
    of_logsumexp: Tensor | None,
) -> Tensor:
    *tensors, row_max, log_sum, entropy, probs = ctx.saved_tensors
    logits, token_ids, active, temperatures = tensors
    if probs is not None and torch._C._autograd._get_current_graph_task_keep_graph():
        probs = probs.clone()  # for the next backward
    return reference.token_gradient(
        logits,
        ctx.scalars._replace(token_ids=token_ids, temperatures=temperatures),
        active,
        SoftmaxStats(row_max, log_sum, entropy),
        (of_logprob, of_entropy, of_logsumexp),
        probs=probs,
    )


def _tangents(ctx: Any, tangent: Tensor) -> tuple[Tensor | None, ...]:
    """Return the tangents of all outputs: each row's gradient times the tangent of its logits."""
    log_sum = ctx.saved_tensors[-3]
    slopes = torch.eye(len(DIFFERENTIABLE), dtype=log_sum.dtype, device=log_sum.device)
    found = {}
    for name, slope in zip(DIFFERENTIABLE, slopes, strict=True):
        gradient = _gradient(ctx, *(x.expand(log_sum.shape) for x in slope))
        found[name] = (gradient * tangent).sum(-1)
    found["log_sum"] = found["logsumexp"]
    return tuple(found.get(name) for name in RowStats._fields)
