"""TRL's `DistillationTrainer` on fastrl: the divergence and its gradient in one pass.

TRL's `_compute_loss` runs the backbones of student and teacher, and compares the distributions in
one function of its module. The instance gets a copy of the method that finds another function under
that name, so TRL's code around it stays, and no other trainer is affected.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor

import fastrl
from fastrl import Objective, Teacher
from fastrl.backend import Backend
from fastrl.integrations.support import Support
from fastrl.integrations.transformers import LmHead
from fastrl.integrations.transformers.forward import inside_head
from fastrl.integrations.transformers.wrappers import causal_model
from fastrl.integrations.trl.handle import Choices, Handle, refuse_no_teacher, with_globals
from fastrl.integrations.trl.two_models import Side

_LOSS = "_compute_loss"
_DIVERGENCE = "_chunked_divergence_loss"
#: The arguments of TRL's function, besides those of the heads, which are in `LmHead`.
_ARGUMENTS = (
    "student_hidden_states",
    "teacher_hidden_states",
    "student_lm_head_weight",
    "teacher_lm_head_weight",
    "completion_mask",
    "beta",
    "num_items_in_batch",
)

SUPPORT: tuple[Support, ...] = (
    Support(
        option="`DistillationTrainer`, any `beta`, `temperature`, accumulation, tokens written by "
        "tools, images, evaluation, LoRA, a teacher of another width",
        handling="fused",
        note="the logits of both models are computed once; TRL computes them again in the "
        "backward. The head multiplies in the dtype of its parameters, because TRL 1.16 loses "
        "accelerate's autocast there. Under DDP with `torch_compile=True`, TRL 1.16 does not "
        "average gradients over ranks, with fastrl or without",
    ),
    Support(
        option="a subclass, or a patched instance, of another trainer than `GRPOTrainer` and "
        "`RLOOTrainer` with a loss that is not TRL's (`ServerDistillationTrainer`, ...)",
        handling="refused",
        note="the trainer's own loss would not be called",
    ),
)


class DistillationHandle(Handle):
    """A `DistillationTrainer` that runs on fastrl until `undo()`."""

    def __init__(self, trainer: Any, base: type, choices: Choices) -> None:
        """Replace the loss of an instance of the class `base`."""
        refuse_no_teacher(trainer)
        own = getattr(base, _LOSS)
        theirs = getattr(own, "__globals__", {}).get(_DIVERGENCE)
        if theirs is None or _DIVERGENCE not in own.__code__.co_names:
            raise ValueError(
                f"{base.__name__}.{_LOSS} of this version of TRL does not call {_DIVERGENCE}, "
                "which use_fastrl replaces"
            )
        found = tuple(inspect.signature(theirs).parameters)
        if found[: len(_ARGUMENTS)] != _ARGUMENTS:
            raise ValueError(
                f"{_DIVERGENCE} of this version of TRL does not take {', '.join(_ARGUMENTS)}"
            )
        super().__init__(trainer, choices)
        fused = with_globals(getattr(trainer, _LOSS), **{_DIVERGENCE: self._divergence})
        self.replace_method(_LOSS, fused)

    def _divergence(
        self,
        student_hidden_states: Tensor,
        teacher_hidden_states: Tensor,
        student_lm_head_weight: Tensor,
        teacher_lm_head_weight: Tensor,
        completion_mask: Tensor,
        beta: float,
        num_items_in_batch: Tensor | int | None = None,
        *,
        temperature: float = 1.0,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the sum of the student's entropies, and the number of tokens."""
        mask = completion_mask != 0
        count = mask.sum()
        normalizer = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch

        def compared(hidden: Tensor, head: LmHead) -> tuple[Tensor, Tensor]:
            def with_teacher(states: Tensor, of_teacher: LmHead) -> tuple[Tensor, Tensor]:
                return distillation_loss(
                    Side(hidden, head),
                    Side(states, of_teacher),
                    mask,
                    normalizer,
                    beta=beta,
                    temperature=temperature,
                    backend=self.backend,
                )

            teacher = causal_model(self.trainer.teacher_model)
            return inside_head(teacher, with_teacher, teacher_hidden_states)

        student = causal_model(self.trainer.model)
        loss, entropy = inside_head(student, compared, student_hidden_states)
        return loss, entropy, count


def distillation_loss(
    student: Side,
    teacher: Side,
    mask: Tensor,
    normalizer: float | Tensor,
    *,
    beta: float,
    temperature: float,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Return the divergences divided by the normalizer, and the sum of the student's entropies.

    Args:
        student: the student's hidden states `[B, K, H]` that predict the tokens, and its head.
        teacher: the teacher's hidden states and head; H may differ.
        mask: 0/1, `[B, K]`.
        normalizer: the divisor of the sum over the tokens.
        beta: selects the divergence, in [0, 1]; see `Teacher`.
        temperature: divides the logits of both models.
        backend: `auto`, or the backend for the chunks.
    """
    result = fastrl.linear_policy_loss(
        student.hidden,
        token_ids=torch.zeros_like(mask, dtype=torch.int64),  # a divergence depends on no token
        advantages=None,
        mask=mask,
        metrics=False,
        temperature=temperature,
        objective=Objective(teacher_coef=1.0),
        normalizer=normalizer,
        teacher=Teacher.from_hidden(
            teacher.hidden, beta=beta, temperature=temperature, **teacher.head.arguments()
        ),
        backend=backend,
        **student.head.arguments(),
    )
    return result.loss, cast("Tensor", result.entropy).sum()
