"""Policy losses of rows: in one pass over them, or of their differentiable statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.contract import CenteringStats, TeacherStats
from fastrl.ops._arguments import RowInputs, flat
from fastrl.ops._autograd.known_gradient import (
    alias_before_overwriting,
    forward_mode,
    mark_overwritten,
    with_gradients,
)
from fastrl.ops._loss.centering_term import add_centering
from fastrl.ops._loss.inputs import LossInputs
from fastrl.ops._loss.slopes import TokenSlopes, per_token
from fastrl.ops._loss.teacher_term import add_divergence, divergence_weights, without_gradient
from fastrl.ops._rows.loops import row_losses
from fastrl.ops._rows.operators import rows_loss_fwd
from fastrl.ops._rows.statistics import TokenStats
from fastrl.ops.policy_loss import PolicyLoss, loss_of_logprobs, policy_loss_result


def loss_in_one_pass(
    rows: RowInputs,
    inputs: LossInputs,
    shape: torch.Size,
    *,
    metrics: bool = True,
    overwritten: Tensor | None = None,
) -> PolicyLoss:
    """Return the loss of rows whose inputs are `tokenwise`, in the caller's shape.

    `overwritten` are the caller's logits, if their gradient is to take their place.
    """
    trainable = rows.source.trainable()
    if overwritten is not None:
        (logits,) = trainable
        assert logits is not None
        trainable = (alias_before_overwriting(logits),)
    differentiable, has_tangents = torch.is_grad_enabled(), forward_mode()
    needs = [
        x is not None and (has_tangents or (differentiable and x.requires_grad)) for x in trainable
    ]
    detached = [None if x is None else x.detach() for x in rows.source.trainable()]
    rows = rows._replace(source=rows.source.with_trainable(detached))
    objective = inputs.objective
    constants = inputs.corrected_arguments(inputs.arguments.advantages, None)  # reads neither
    active, of_rows = inputs.active, rows.token_ids.shape
    of_tokens = per_token(constants, active, of_rows)
    function = objective.surrogate if callable(objective.surrogate) else None
    slopes = TokenSlopes(rows.active, of_tokens, objective.arguments, function, inputs.backend)
    weights = None
    if rows.teacher.given():
        weights = divergence_weights(objective, constants, active)
    centering_weights = None
    if rows.sampler.given():
        centering_weights = inputs.centering_weights(inputs.arguments.advantages, None)
    every = (weights, centering_weights)
    weights_of_rows = [None if x is None else x.reshape(of_rows) for x in every]
    if function is not None or overwritten is not None:
        logprobs, entropy, of_teacher, of_sampler, grads = row_losses(
            rows,
            slopes,
            *weights_of_rows,
            needs,
            metrics=metrics,
            overwrite=overwritten is not None,
        )
    else:
        loss_arguments = (*of_tokens, *objective.arguments.flat(), *weights_of_rows)
        logprobs, entropy, of_teacher, of_sampler, grads = rows_loss_fwd(
            *flat(rows), *loss_arguments, needs, metrics
        )
    if overwritten is not None:
        mark_overwritten(overwritten)
    logprobs, entropy = logprobs.reshape(active.shape), entropy.reshape(active.shape)
    if not metrics:  # rows of weight 0 were not projected, and 0 times their loss could be NaN
        projected = slopes.weighted().reshape(active.shape)
        for x in every:
            projected = projected if x is None else projected | (x != 0)
        projected = active & projected
        inputs = inputs._replace(active=projected)
    loss, slope, entropy_slope, values = inputs.evaluate(logprobs, entropy, constants)
    active, still = inputs.active, without_gradient(slope, entropy_slope)
    of_term: list[Tensor] = []
    if centering_weights is not None:
        centered = CenteringStats._make(x.reshape(active.shape) for x in of_sampler)
        loss, values, still, *of_term = add_centering(
            loss, values, centered, centering_weights, constants, active, still
        )
    if weights is not None:
        compared = TeacherStats._make(x.reshape(active.shape) for x in of_teacher)
        loss, values = add_divergence(loss, values, compared, weights, active, still, objective)
    if of_term:
        values = torch.cat([values, *of_term])
    if any(needs):
        wanted = [x for x, need in zip(trainable, needs, strict=True) if need]
        loss = with_gradients(loss, [*zip(wanted, grads, strict=True)], rows.backend)
    result = policy_loss_result(loss, values, logprobs, entropy, inputs, shape)
    return result if metrics else result._replace(metrics={})


def loss_of_stats(
    stats: TokenStats,
    inputs: LossInputs,
    shape: torch.Size,
    centered: CenteringStats | None = None,
) -> PolicyLoss:
    """Return the loss of differentiable statistics; their backward is a second pass."""

    def padded(x: Tensor | None) -> Tensor:
        assert x is not None
        return x.reshape(inputs.active.shape)

    of_teacher = None
    if stats.divergence is not None:
        compared = stats.divergence, stats.teacher_entropy, stats.agrees
        of_teacher = TeacherStats._make(padded(x) for x in compared)
    if centered is not None:
        centered = CenteringStats._make(map(padded, centered))
    logprobs, entropy = padded(stats.logprobs), padded(stats.entropy)
    return loss_of_logprobs(logprobs, entropy, inputs, shape, of_teacher, centered)
