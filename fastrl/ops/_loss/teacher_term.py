"""The divergence from a teacher, or from a reference policy, as a term of a policy loss."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import METRICS, LossArguments, TeacherStats
from fastrl.objective import Objective
from fastrl.ops._arguments import TeacherArguments


def check_teacher(objective: Objective, teacher: TeacherArguments) -> None:
    """Raise unless the objective and the teacher fit each other."""
    if not teacher.given():
        for needed, name in (
            (objective.teacher_coef, "objective.teacher_coef is above 0"),
            (objective.has_exact_kl, "objective.kl_estimator is 'exact'"),
        ):
            if needed:
                raise ValueError(
                    f"teacher is needed when {name}: give it to logits_policy_loss or "
                    "linear_policy_loss"
                )
    elif objective.has_exact_kl and teacher.logprobs is not None:
        raise ValueError(
            "teacher must have hidden states or logits with objective.kl_estimator 'exact': the "
            "log-probabilities of some tokens give only a lower bound of the KL"
        )
    elif objective.has_exact_kl and teacher.beta != 1:
        raise ValueError(
            "teacher.beta must be 1 with objective.kl_estimator 'exact', which is "
            f"KL(policy, reference), got {teacher.beta}"
        )


def divergence_weights(objective: Objective, arguments: LossArguments, active: Tensor) -> Tensor:
    """Return the factor of each divergence in the loss, `[B, T]`."""
    weights, coefficient = arguments.weights, objective.teacher_coef
    if objective.has_exact_kl:
        coefficient = objective.kl_coef or 0.0
        weights = weights if arguments.kl_weights is None else arguments.kl_weights
    sequences = reference.sequences_of(active, arguments.cu_seqlens)
    return coefficient * torch.where(active, sequences.per_token(weights, active), 0.0)


def without_gradient(slope: Tensor, entropy_slope: Tensor | None) -> Tensor:
    """Return which tokens get no gradient through their log-probability or entropy."""
    still = slope == 0
    return still if entropy_slope is None else still & (entropy_slope == 0)


def add_divergence(
    loss: Tensor,
    metrics: Tensor,
    compared: TeacherStats,
    weights: Tensor,
    active: Tensor,
    still: Tensor,
    objective: Objective,
) -> tuple[Tensor, Tensor]:
    """Return the loss with its divergence term, and the metrics including a teacher's.

    `still` marks tokens that have no gradient from the other terms.
    """
    loss = loss + torch.where(weights == 0, 0.0, weights * compared.divergence).sum()
    count = active.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return torch.where(active, values.detach(), 0).sum(dtype=metrics.dtype) / count

    means = torch.stack([mean(values) for values in compared])
    values = dict(zip(METRICS, metrics.unbind(), strict=True))
    # the divergence is 0, its least value, only where both distributions are the same
    values["zero_grad_fraction"] = mean(still & ((weights == 0) | (compared.divergence == 0)))
    if objective.has_exact_kl:
        values["kl"] = means[0]
    return loss, torch.cat([torch.stack([*values.values()]), means])
