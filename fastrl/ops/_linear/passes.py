"""The loops of the linear forms over chunks of rows, registered as operators for every device.

    per chunk, on a CPU:  project -> statistics -> slopes -> dL/dlogits in place -> gradient GEMMs
               on a GPU:  project -> one kernel: statistics, slope, dL/dlogits   -> gradient GEMMs

Masked rows are left out of all GEMMs, and rows with advantage or weight 0 are left out of the GEMMs
for gradients. On a CPU, rows whose slopes turn out to be 0 (clipped) are left out of these, too. On
a GPU that would take a synchronization per chunk, which costs more than it saves, so these rows
stay as zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.contract import LEVELS, SURROGATES, LossArguments, ObjectiveArguments, RowStats
from fastrl.library import called, operators
from fastrl.ops._linear.call import Arguments, LinearCall, without_autocast
from fastrl.ops._linear.chunks import (
    as_batch,
    compact_rows,
    order_rows,
    write_chunk_gradient,
)
from fastrl.ops._linear.walk import LinearWalk, Projected
from fastrl.ops._loss.slopes import TokenSlopes
from fastrl.ops._process_groups import gathered
from fastrl.ops._teacher.chunks import Comparison
from fastrl.ops._teacher.rows import TeacherStats


@without_autocast
@torch.no_grad()
def linear_token_stats_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the fields of `RowStats` and `TeacherStats` of all rows, `[N]`; 0 at inactive ones."""
    call = Arguments(arguments).take(LinearCall)
    active = call.active()
    kept = call.kept_rows(checked=True)
    call.check_teacher()
    order = order_rows(active, active, compact=call.compact, kept=kept)
    walk = LinearWalk(call, order, [False] * 5, kept)
    stats, compared = walk.no_stats(), walk.no_teacher_stats()
    chunks = list(walk.trained())
    for chunk, (projected, of_chunk) in zip(chunks, walk.with_stats(chunks), strict=True):
        _store(stats, chunk, of_chunk)
        comparison = walk.compare(chunk, projected)
        if comparison is not None:
            _store(compared, chunk, comparison.compare(of_chunk))
    return (*map(walk.expanded, stats), *walk.expanded_comparison(compared))


def _store(values: Sequence[Tensor], chunk: slice, of_chunk: Sequence[Tensor]) -> None:
    for each, some in zip(values, of_chunk, strict=True):
        each[chunk] = some


@without_autocast
@torch.no_grad()
def linear_token_stats_bwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Project all chunks again and return the gradients of hidden states and parameters.

    After the arguments of the forward come row_max, log_sum, entropy, the upstream gradients of
    logprobs, entropy and logsumexp, slope_mean, row_max and log_sum of the teacher, the upstream
    gradient of the divergence, and which gradients are needed.
    """
    flat = Arguments(arguments)
    call = flat.take(LinearCall)
    (
        row_max,
        log_sum,
        entropy,
        *grads,
        slope_mean,
        of_row_max,
        of_log_sum,
        grad_divergence,
        needs,
    ) = flat.rest()
    active = call.active()
    summed = call.parts.split() and call.parts.reduce_hidden_gradient and needs[0]
    # the ranks exchange what each has of a teacher's tokens, also in the backward
    exchanged = call.parts.split() and call.teacher.teacher_ids is not None
    if exchanged and grad_divergence is None:
        grad_divergence = torch.zeros_like(row_max)
    may_flow = torch.zeros_like(active)
    for grad in (*grads, grad_divergence):
        may_flow = may_flow if grad is None else may_flow | (grad != 0)
    if summed or exchanged:
        # the ranks work on the same rows, even if a loss differs by rounding
        may_flow = gathered(may_flow.byte(), call.parts.process_group()).bool().any(0)
    kept = call.kept_rows()
    order = order_rows(active, may_flow, compact=call.compact, kept=kept)
    order = order._replace(scored=0)
    walk = LinearWalk(call, order, needs, kept, exchanging=False)
    unused = row_max.new_empty(row_max.shape)
    saved = RowStats._make([unused] * len(RowStats._fields))
    saved = saved._replace(row_max=row_max, log_sum=log_sum, entropy=entropy)
    saved = RowStats._make(order.of(stat) for stat in saved)
    grads = [None if grad is None else order.of(grad) for grad in grads]
    compared = None
    if grad_divergence is not None:
        none = torch.empty_like(slope_mean)
        compared = TeacherStats(none, none, none, slope_mean, of_row_max, of_log_sum)
        compared = TeacherStats._make(order.of(value) for value in compared)
        grad_divergence = order.of(grad_divergence)
    projected: Projected | None = None
    comparison: Comparison | None = None
    for chunk in walk.trained():
        projected = walk.project(chunk)
        stats = RowStats._make(stat[chunk] for stat in saved)
        of_chunk = [None if grad is None else grad[chunk] for grad in grads]
        comparison = None if compared is None else walk.compare(chunk, projected)
        if comparison is None or compared is None:
            _write_gradient(projected, stats, of_chunk, call.backend)
        else:
            comparison.write_gradient(
                stats,
                compared.indexed(chunk),
                grad_divergence[chunk],
                of_chunk,
                narrow=projected.products.narrow,
            )
        walk.add_gradients(chunk, projected)
    projected = comparison = None
    return tuple(walk.gradients())


def linear_policy_loss_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Return statistics of all rows and the gradients of the loss, in one pass over the rows.

    The statistics are log-probability, entropy, divergence, the teacher's entropy and whether the
    top tokens agree. The arguments of `LinearCall` are followed by the arguments of the loss and
    the objective, the weights of the divergence, and flags for the needed gradients and for metrics
    that need rows without a gradient.
    """
    flat = Arguments(arguments)
    call = flat.take(LinearCall)
    loss, objective = flat.take(LossArguments), flat.take(ObjectiveArguments)
    weights, needs, metrics = flat.rest()
    if LEVELS[objective.level] != "token" or SURROGATES[objective.surrogate] == "gmpo":
        raise ValueError("level must be token: the rows of a chunk are scored by themselves")
    slopes = TokenSlopes(call.active(), loss, objective, None, call.backend)
    return tuple(linear_loss_pass(call, slopes, weights, needs, metrics=metrics))


@without_autocast
@torch.no_grad()
def linear_loss_pass(
    call: LinearCall,
    slopes: TokenSlopes,
    divergence_weights: Tensor | None,
    needs: list[bool],
    *,
    metrics: bool,
) -> tuple[Tensor, ...]:
    """Compute the statistics of every row and the gradients in a single pass."""
    kept = call.kept_rows(checked=True)
    call.check_teacher()
    may_flow = slopes.may_flow()
    if divergence_weights is not None:
        may_flow = may_flow | (divergence_weights != 0)
    order = order_rows(call.active(), may_flow, compact=call.compact, kept=kept)
    if not metrics:
        order = order._replace(scored=0)
    walk = LinearWalk(call, order, needs, kept)
    slopes = slopes.taken(order.indices)
    if divergence_weights is not None:
        divergence_weights = order.of(divergence_weights)
    logprobs, entropy, *_ = walk.no_stats()
    compared, with_teacher = walk.no_teacher_stats(), call.teacher.given()
    one_kernel = call.on_gpu() and slopes.function is None and not call.parts.split()
    one_kernel = one_kernel and not with_teacher
    # if the vocabulary is split, the ranks add up the gradients of the same rows
    compacting = call.compact and call.hidden.device.type == "cpu"
    compacting = compacting and not (one_kernel or call.parts.split() or with_teacher)
    differentiable = any(needs)
    in_one_kernel = one_kernel and differentiable
    chunks = [
        # first: their slopes are 0 unless a log-probability is NaN, which must reach all gradients
        *((differentiable and compacting, chunk) for chunk in walk.scored()),
        *((differentiable, chunk) for chunk in walk.trained() if not in_one_kernel),
    ]
    stats_of_chunks = walk.with_stats(chunk for _, chunk in chunks)
    projected: Projected | None = None
    comparison: Comparison | None = None
    for (trained, chunk), (projected, stats) in zip(chunks, stats_of_chunks, strict=True):
        logprobs[chunk], entropy[chunk] = stats.logprobs, stats.entropy
        comparison = walk.compare(chunk, projected)
        if comparison is not None:
            of_chunk = comparison.compare(stats)
            _store(compared, chunk, of_chunk)
        if trained and comparison is not None and divergence_weights is not None:
            slope, entropy_slope = slopes.of_chunk(stats.logprobs, stats.entropy, chunk)
            comparison.write_gradient(
                stats,
                of_chunk,
                divergence_weights[chunk],
                (slope, entropy_slope, None),
                narrow=projected.products.narrow,
            )
            walk.add_gradients(chunk, projected)
        elif trained:
            _train(walk, chunk, projected, slopes, stats, call.backend, compacting=compacting)
        elif differentiable:
            walk.pass_on_nan(chunk, stats.logprobs)
    if in_one_kernel:
        for chunk in walk.trained():
            outputs = _train_in_one_kernel(walk, chunk, walk.project(chunk), slopes)
            logprobs[chunk], entropy[chunk] = outputs
    projected = comparison = None
    divergence, teacher_entropy, agrees, *_ = walk.expanded_comparison(compared)
    of_teacher = (divergence, teacher_entropy, agrees)
    return (walk.expanded(logprobs), walk.expanded(entropy), *of_teacher, *walk.gradients())


def _train_in_one_kernel(
    walk: LinearWalk, chunk: slice, projected: Projected, slopes: TokenSlopes
) -> tuple[Tensor, Tensor]:
    """Add the gradients of a chunk; return its log-probabilities and entropies."""
    logprobs, entropy = called(
        operators(slopes.backend).logits_policy_loss_fwd_,
        projected.logits[None],
        *as_batch(projected.rows),
        *slopes.arguments_of(chunk),
        *slopes.objective.flat(),
        projected.products.narrow,
    )
    walk.add_gradients(chunk, projected)
    return logprobs[0], entropy[0]


def _train(
    walk: LinearWalk,
    chunk: slice,
    projected: Projected,
    slopes: TokenSlopes,
    stats: RowStats,
    backend: str,
    *,
    compacting: bool,
) -> None:
    """Add the gradients of a chunk with these statistics; `compacting` leaves out zeros."""
    slope, entropy_slope = slopes.of_chunk(stats.logprobs, stats.entropy, chunk)
    remaining = None
    if compacting:
        has_gradient = slope != 0
        if entropy_slope is not None:
            has_gradient = has_gradient | (entropy_slope != 0)
        if not bool(has_gradient.all()):
            logits, remaining = compact_rows(projected.logits, has_gradient)
            projected = projected.taken(remaining, logits)
            stats = RowStats._make(stat[remaining] for stat in stats)
            slope = slope[remaining]
            entropy_slope = None if entropy_slope is None else entropy_slope[remaining]
    if projected.logits.shape[0]:
        _write_gradient(projected, stats, (slope, entropy_slope, None), backend)
        walk.add_gradients(chunk, projected, remaining)


def _write_gradient(
    projected: Projected, stats: RowStats, grads: Sequence[Tensor | None], backend: str
) -> None:
    """Overwrite the logits of a chunk with dL/dlogits; see `write_chunk_gradient`."""
    logits, rows, narrow = projected.logits, projected.rows, projected.products.narrow
    write_chunk_gradient(logits, rows, stats, grads, backend, narrow=narrow, part=projected.part)


def _with_autograd_inside(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Enable autograd inside an operator, for the reference backend in a compiled graph."""
    key = torch._C.DispatchKey.AutogradFunctionality

    @functools.wraps(operator)
    def run(*arguments: Any) -> Any:
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        try:
            return operator(*arguments)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)

    return run


for _operator in (linear_token_stats_fwd, linear_token_stats_bwd, linear_policy_loss_fwd):
    torch.library.impl(
        f"fastrl::{_operator.__name__}",
        "CompositeExplicitAutograd",
        _with_autograd_inside(_operator),
    )
