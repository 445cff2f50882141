"""verl's distillation from a teacher's K most probable tokens on fastrl, for FSDP.

The loss of a position is sum_k p_k (log p_k - log q_k) over these K tokens, with the teacher's p,
the student's q, and both log-probabilities bounded from below. Unlike `fastrl.Teacher.from_top_k`,
it has no event for all other tokens, so it is not a divergence and may be negative.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from fastrl.integrations.replacing import named
from fastrl.integrations.verl.logits import statistic

_ROWS = 256


def compute_forward_kl_topk(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str,
) -> dict[str, Tensor]:
    """Return loss and diagnostics of each token, fp32 `[1, N]`; the loss has a gradient.

    Log-sum-exp and log-probabilities are fp32 even for 16-bit logits. The gradient is computed with
    the loss, because verl lets a later function overwrite the logits. It is the only tensor of the
    size of the logits that is kept (verl keeps log-probabilities), and the backward, which can run
    only once, scales it in place. There is nothing to divide into chunks, so `use_chunked_topk` has
    no effect.

    Args:
        student_logits: `[1, N, V]`, or this rank's part of N with Ulysses sequence parallelism.
        teacher_topk_log_probs: nested, `[B, T, K]` of N tokens in all, or `[1, N, K]`.
        teacher_topk_ids: ids of these tokens, in the same shape.
        config: verl's `DistillationConfig`.
        data_format: ignored, as in verl's function for FSDP.

    Returns:
        `distillation_losses`; `student_mass` and `teacher_mass`, the probability of the K tokens;
        `overlap_count`, the number of them among the student's K most probable tokens; and
        `overlap_token_advantage`, the negated mean of their terms of the loss.

    Examples:
        >>> import types, torch
        >>> from fastrl.integrations.verl.distillation import compute_forward_kl_topk
        >>> config = types.SimpleNamespace(log_prob_min_clamp=None)
        >>> config = types.SimpleNamespace(distillation_loss=config)
        >>> teacher, ids = torch.tensor([[[0.5, 0.25]]]).log(), torch.tensor([[[0, 2]]])
        >>> found = compute_forward_kl_topk(torch.zeros(1, 1, 4), teacher, ids, config, "thd")
        >>> found["distillation_losses"], found["student_mass"]  # log 2 / 2
        (tensor([[0.3466]]), tensor([[0.5000]]))
    """
    del data_format
    log_p, ids = _of_this_rank(teacher_topk_log_probs), _of_this_rank(teacher_topk_ids).long()
    if not log_p.shape == ids.shape == (*student_logits.shape[:-1], ids.shape[-1]):
        raise ValueError(
            "teacher_topk_log_probs and teacher_topk_ids must have K entries for each of the "
            f"tokens {tuple(student_logits.shape[:-1])} of student_logits, got "
            f"{tuple(log_p.shape)} and {tuple(ids.shape)}"
        )
    log_p, bound = log_p.detach().float(), config.distillation_loss.log_prob_min_clamp
    lowest = -torch.inf if bound is None else float(bound)
    loss, log_q = _Loss.apply(student_logits, log_p, ids, lowest)  # type: ignore[no-untyped-call]
    mine = student_logits.detach().topk(ids.shape[-1]).indices.sort().values
    place = torch.searchsorted(mine, ids).clamp(max=ids.shape[-1] - 1)
    overlap = mine.gather(-1, place) == ids
    count = overlap.sum(-1)
    terms = torch.where(overlap, _terms(log_p, log_q, lowest), 0.0)
    return {
        "distillation_losses": loss,
        "student_mass": log_q.exp().sum(-1),
        "teacher_mass": log_p.exp().sum(-1),
        "overlap_count": count,
        "overlap_token_advantage": -terms.sum(-1) / count.clamp(min=1),
    }


class _Loss(torch.autograd.Function):
    """The loss of each token, and log q of the tokens that the teacher names."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, log_p: Tensor, ids: Tensor, lowest: float
    ) -> tuple[Tensor, Tensor]:
        needed = logits.requires_grad
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_(needed)
            log_sum = statistic("logsumexp", "student_logits", leaf)
        log_q = logits.gather(-1, ids).float() - log_sum.detach()[..., None]
        if needed:
            p = log_p.clamp(min=lowest).exp()
            p = torch.where(log_q >= lowest, p, 0.0)  # the others are on the bound
            (slope,) = torch.autograd.grad(log_sum, leaf, p.sum(-1))
            ctx.save_for_backward(slope.scatter_add_(-1, ids, -p.to(slope.dtype)))
        ctx.mark_non_differentiable(log_q)
        return _terms(log_p, log_q, lowest).sum(-1), log_q

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        # in place: a second backward through this node raises, and verl has none; by rows, since a
        # CPU copies both operands of two dtypes
        parts = (x.split(_ROWS, dim=-2) for x in (slope, upstream[..., None]))
        for part, factor in zip(*parts, strict=True):
            part.mul_(factor)
        return slope, None, None, None


def _terms(log_p: Tensor, log_q: Tensor, lowest: float) -> Tensor:
    log_p, log_q = log_p.clamp(min=lowest), log_q.clamp(min=lowest)
    return log_p.exp() * (log_p - log_q)


def _of_this_rank(x: Tensor) -> Tensor:
    """Return a value per token as verl's engine packs them, `[1, N, K]`."""
    packed = x.values()[None] if x.is_nested else x
    ulysses: Any = sys.modules.get("verl.utils.ulysses")
    if ulysses is None or ulysses.get_ulysses_sequence_parallel_world_size() == 1:
        return packed
    part: Tensor = ulysses.slice_input_tensor(packed, dim=1)
    return part


REPLACEMENTS = named(
    "verl.trainer.distillation.fsdp.losses",
    compute_forward_kl_topk,
    optional=True,
    when_imported=True,
)
