"""The loops over rows of logits: their statistics, gradients and losses, on every backend.

    given logits:        statistics -> slopes -> dL/dlogits
    projected, on a CPU: project -> statistics -> slopes -> dL/dlogits in place -> gradient GEMMs
               on a GPU: project -> one kernel: statistics, slope, dL/dlogits   -> gradient GEMMs

A teacher's row meets the student's after the statistics, in `compare` of `_companions/pair.py`, or
of `_companions/top_k.py` for a teacher's K tokens, and again where dL/dlogits is written. The
sampler's tokens of score centering go along in `_companions/centered_rows.py`.

With `compact`, masked rows are left out of all GEMMs, and rows with advantage or weight 0 of the
GEMMs for gradients. On a CPU, so are rows whose slopes turn out to be 0 (clipped), unless there is
a teacher or score centering, or the vocabulary is split. On a GPU that would take a synchronization
per chunk, which costs more than it saves, so these rows stay as zeros. A backward that projects
again leaves out all rows without a slope.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fastrl.contract import FLAGS, CenteringStats, RowStats, SavedStats, TeacherStats
from fastrl.library import called, operators
from fastrl.ops._arguments import RowInputs
from fastrl.ops._companions.centered_rows import CenteredRows
from fastrl.ops._companions.companion import Comparison
from fastrl.ops._companions.pair import SavedComparison, Upstream
from fastrl.ops._loss.slopes import TokenSlopes
from fastrl.ops._process_groups import gathered
from fastrl.ops._rows.chunk import Chunk, PerRow, Results, check_values, kept_rows, with_stats
from fastrl.ops._rows.given import GivenRows
from fastrl.ops._rows.order import order_rows
from fastrl.ops._rows.projected import ProjectedRows


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disable autocast in a function, which gets the dtype as an argument wherever it matters."""

    @functools.wraps(function)
    def run(inputs: RowInputs, *arguments: Any, **options: Any) -> Any:
        device = inputs.token_ids.device.type
        with torch.no_grad():
            available = torch.amp.is_autocast_available(device)
            if not (available and torch.is_autocast_enabled(device)):
                return function(inputs, *arguments, **options)
            with torch.autocast(device, enabled=False):
                return function(inputs, *arguments, **options)

    return run


@without_autocast
def row_stats(
    inputs: RowInputs,
) -> tuple[RowStats, TeacherStats | None, SavedComparison | None, CenteringStats | None]:
    """Return the statistics of all rows, a teacher's and the sampler's; 0 at inactive rows."""
    check_values(inputs)
    rows: GivenRows | ProjectedRows
    if inputs.source.logits is not None:
        rows = GivenRows(inputs)
    else:
        active, kept = inputs.active.reshape(-1), kept_rows(inputs)
        order = order_rows(active, active, compact=inputs.compact, kept=kept)
        rows = ProjectedRows(inputs, order, [False] * 5, kept)
    results, of_teacher, saved, of_sampler = (
        Results(inputs.token_ids, dtypes_of(inputs, *kind._fields))
        for kind in (RowStats, TeacherStats, SavedComparison, CenteringStats)
    )
    for chunk, stats in with_stats(rows.with_gradient()):
        results.put(chunk, stats)
        comparison = rows.comparison(chunk)
        compared = comparison.compare(stats.of_softmax())
        if compared is not None:
            of_teacher.put(chunk, compared.stats)
            saved.put(chunk, compared.saved)
        if isinstance(comparison, CenteredRows):
            of_sampler.put(chunk, comparison.centering(stats.of_softmax()))
    with_teacher, with_sampler = inputs.teacher.given(), inputs.sampler.given()
    return (
        RowStats._make(results.values()),
        TeacherStats._make(of_teacher.values()) if with_teacher else None,
        SavedComparison._make(saved.values()) if with_teacher else None,
        CenteringStats._make(of_sampler.values()) if with_sampler else None,
    )


def dtypes_of(inputs: RowInputs, *names: str) -> list[torch.dtype]:
    """Return the dtypes of statistics."""
    real = inputs.source.dtype()
    return [torch.bool if name in FLAGS else real for name in names]


@without_autocast
def row_gradients(
    inputs: RowInputs,
    saved: SavedStats,
    comparison: SavedComparison | None,
    grad_divergence: Tensor | None,
    grad_centering: Tensor | None,
    needs: list[bool],
    *,
    overwrite: bool = False,
) -> list[Tensor]:
    """Return the needed gradients of the source; the logits are read, or projected, again."""
    if comparison is not None and grad_divergence is None:
        grad_divergence = torch.zeros_like(saved.row_max)
    rows: GivenRows | ProjectedRows
    if inputs.source.logits is not None:
        rows = GivenRows(inputs, overwrite=overwrite)
    else:
        slopes = [*saved.slopes(), grad_divergence, grad_centering]
        rows = _projected_again(inputs, slopes, needs)
    slopes_of_stats = saved.of_softmax(), saved.slopes()
    of_rows = Upstream(*slopes_of_stats, comparison, grad_divergence, grad_centering)
    upstream = PerRow(rows.order, of_rows)
    chunk: Chunk | None = None
    for chunk in rows.with_gradient():
        rows.write_gradient(chunk, rows.comparison(chunk), upstream.of(chunk))
    chunk = None
    return rows.gradients()


def _projected_again(
    inputs: RowInputs, slopes: list[Tensor | None], needs: list[bool]
) -> ProjectedRows:
    """Return the rows that have a slope, in their order."""
    active, parts = inputs.active.reshape(-1), inputs.parts
    summed = parts.split() and parts.reduce_hidden_gradient and needs[0]
    # the ranks exchange what each has of some tokens, also in the backward
    some = inputs.teacher.logprobs is not None or inputs.sampler.given()
    exchanged = parts.split() and some
    may_flow = torch.zeros_like(active)
    for slope in slopes:
        may_flow = may_flow if slope is None else may_flow | (slope.reshape(-1) != 0)
    if summed or exchanged:
        # the ranks work on the same rows, even if a loss differs by rounding
        may_flow = gathered(may_flow.byte(), parts.process_group()).bool().any(0)
    kept = kept_rows(inputs)
    order = order_rows(active, may_flow, compact=inputs.compact, kept=kept).without_others()
    return ProjectedRows(inputs, order, needs, kept, exchanging=False)


@without_autocast
def row_losses(
    inputs: RowInputs,
    slopes: TokenSlopes,
    divergence_weights: Tensor | None,
    centering_weights: Tensor | None,
    needs: list[bool],
    *,
    metrics: bool,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, TeacherStats | None, CenteringStats | None, list[Tensor]]:
    """Return log-probabilities, entropies and the gradients of the loss, from one pass.

    Before the gradients come the statistics of a teacher and of the sampler.
    """
    check_values(inputs)
    rows: GivenRows | ProjectedRows
    in_one_kernel: ProjectedRows | None = None
    if inputs.source.logits is not None:
        rows = GivenRows(inputs, overwrite=overwrite)
    else:
        may_flow = slopes.may_flow()
        for weights in (divergence_weights, centering_weights):
            may_flow = may_flow if weights is None else may_flow | (weights != 0)
        one_kernel = _has_one_kernel(inputs, slopes)
        rows = _projected_for_loss(inputs, may_flow, needs, metrics=metrics, one_kernel=one_kernel)
        in_one_kernel = rows if one_kernel and any(needs) else None
    # the others first: a NaN log-probability of theirs must reach all gradients
    chunks = chain(rows.others(), () if in_one_kernel else rows.with_gradient())
    order, like = rows.order, inputs.token_ids
    results = Results(like, dtypes_of(inputs, "logprobs", "entropy"))
    compared, centered = (
        Results(like, dtypes_of(inputs, *kind._fields)) for kind in (TeacherStats, CenteringStats)
    )
    values = PerRow(order, (slopes, divergence_weights, centering_weights))
    chunk: Chunk | None = None
    comparison: Comparison | None = None
    for chunk, stats in with_stats(chunks):
        results.put(chunk, (stats.logprobs, stats.entropy))
        of_softmax, comparison = stats.of_softmax(), rows.comparison(chunk)
        found = comparison.compare(of_softmax)
        if found is not None:
            compared.put(chunk, found.stats)
        if isinstance(comparison, CenteredRows):
            centered.put(chunk, comparison.centering(of_softmax))
        if not any(needs):
            continue
        if isinstance(rows, GivenRows) or rows.may_flow(chunk):
            slopes_here, *weights_here = values.of(chunk)
            of_loss = slopes_here.of(stats.logprobs, stats.entropy)
            saved = None if found is None else found.saved
            upstream = Upstream(of_softmax, (*of_loss, None), saved, *weights_here)
            rows.write_gradient(chunk, comparison, upstream)
        else:
            rows.pass_on_nan(chunk, stats.logprobs)
    if in_one_kernel is not None:
        for chunk in in_one_kernel.with_gradient():
            slopes_here, *_ = values.of(chunk)
            results.put(chunk, _write_in_one_kernel(chunk, slopes_here))
            in_one_kernel.add_gradients(chunk)
    chunk = comparison = None
    logprobs, entropy = results.values()
    of_teacher = TeacherStats._make(compared.values()) if inputs.teacher.given() else None
    of_sampler = CenteringStats._make(centered.values()) if inputs.sampler.given() else None
    gradients = rows.gradients() if any(needs) else []
    return logprobs, entropy, of_teacher, of_sampler, gradients


def _has_one_kernel(inputs: RowInputs, slopes: TokenSlopes) -> bool:
    """Return whether a kernel computes statistics, slopes and dL/dlogits of a chunk."""
    return inputs.on_gpu() and slopes.function is None and inputs.alone()


def _projected_for_loss(
    inputs: RowInputs, may_flow: Tensor, needs: list[bool], *, metrics: bool, one_kernel: bool
) -> ProjectedRows:
    kept, active = kept_rows(inputs), inputs.active.reshape(-1)
    order = order_rows(active, may_flow.reshape(-1), compact=inputs.compact, kept=kept)
    if not metrics:
        order = order.without_others()
    # if the vocabulary is split, the ranks add up the gradients of the same rows
    alone = inputs.alone() and not one_kernel
    compacting = alone and inputs.compact and active.device.type == "cpu"
    return ProjectedRows(inputs, order, needs, kept, compacting=compacting)


def _write_in_one_kernel(chunk: Chunk, slopes: TokenSlopes) -> tuple[Tensor, Tensor]:
    """Overwrite the logits with dL/dlogits; return log-probabilities and entropies."""
    assert chunk.projected is not None
    logprobs, entropy = called(
        operators(slopes.backend).logits_policy_loss_fwd_,
        chunk.logits,
        *chunk.rows.arguments,
        *slopes.arguments,
        *slopes.objective.flat(),
        chunk.projected.products.narrow,
    )
    return logprobs, entropy
