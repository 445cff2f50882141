"""Liger's `LigerFusedLinearJSDLoss` on fastrl: distillation from hidden states and two LM heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fastrl


class LigerFusedLinearJSDFunction:
    """The `apply` of Liger's autograd function, with the same arguments and results."""

    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None,
        teacher_bias: Tensor | None,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return the loss of `LigerFusedLinearJSDLoss`, which has the same arguments.

        Examples:
            >>> import torch
            >>> from fastrl.integrations.liger import LigerFusedLinearJSDFunction
            >>> x, head, labels = torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([0, -100])
            >>> LigerFusedLinearJSDFunction.apply(x, head, x, head, labels, None, None)
            tensor(0.6931)
        """
        loss_function = LigerFusedLinearJSDLoss(
            weight_hard_loss,
            weight_soft_loss,
            beta,
            ignore_index,
            temperature,
            compiled,
            chunk_size,
            return_soft_hard_loss,
        )
        return loss_function.forward(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            true_labels,
            student_bias,
            teacher_bias,
        )


class LigerFusedLinearJSDLoss(nn.Module):
    """Distillation by the generalized Jensen-Shannon divergence, with Liger's arguments.

        weight_hard_loss * CE + weight_soft_loss * D

    Both are means over the labels that are not `ignore_index` (0 if there are none), in nats. CE is
    -log q of the label at temperature 1. D is the divergence of `fastrl.Teacher` with this `beta`
    (arXiv 2306.13649), with both distributions at the `temperature`.

    Loss and gradient take one pass over the rows. If the weight of the hard loss is not 0 and the
    temperature is not 1, or the teacher has more tokens than the student, the two losses are of
    different logits, and each takes one pass.

    Args:
        weight_hard_loss: weight of the cross-entropy with the labels.
        weight_soft_loss: weight of the divergence from the teacher, at least 0.
        beta: selects the divergence, in [0, 1]: 0 is KL(teacher, student), 1 KL(student, teacher).
        ignore_index: rows with this label have no effect.
        temperature: divides the logits of student and teacher in the divergence, above 0.
        compiled: ignored.
        chunk_size: ignored.
        return_soft_hard_loss: whether to return, after the loss, the divergence and the
            cross-entropy, both without weight and gradient.

    Raises:
        ValueError: an option has a value that fastrl does not allow, or the student has more tokens
            than the teacher.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.liger import LigerFusedLinearJSDLoss
        >>> loss_function = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0)
        >>> student, teacher = torch.zeros(2, 1, requires_grad=True), torch.tensor([[2.0], [0.0]])
        >>> hidden, labels = torch.ones(2, 1), torch.tensor([1, -100])
        >>> loss = loss_function(hidden, student, hidden, teacher, labels)
        >>> loss.backward()
        >>> loss.item(), student.grad[:, 0]
        (0.0895..., tensor([-0.1002,  0.1002]))
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        super().__init__()
        del compiled, chunk_size
        for name, value, fits in (
            ("beta must be in [0, 1]", beta, 0 <= beta <= 1),
            ("temperature must be above 0", temperature, temperature > 0),
            ("weight_soft_loss must be at least 0", weight_soft_loss, weight_soft_loss >= 0),
        ):
            if not fits:
                raise ValueError(f"{name}, got {value}")
        self.weight_hard_loss, self.weight_soft_loss = weight_hard_loss, weight_soft_loss
        self.beta, self.ignore_index, self.temperature = beta, ignore_index, temperature
        self.return_soft_hard_loss = return_soft_hard_loss

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return the loss, fp32, and with `return_soft_hard_loss` the two losses without weights.

        Args:
            student_input: hidden states, `[N, H]` or `[B, T, H]`.
            student_weight: the student's LM head, `[V, H]`.
            teacher_input: the teacher's hidden states, `[N, H']` or `[B, T, H']`.
            teacher_weight: the teacher's head, `[V', H']` with V' >= V.
            true_labels: integers `[N]` or `[B, T]`: the token that each position predicts.
            student_bias: `[V]`, or None.
            teacher_bias: `[V']`, or None.
        """
        missing = teacher_weight.shape[0] - student_weight.shape[0]
        if missing < 0:
            raise ValueError(
                f"teacher_weight must have at least the {student_weight.shape[0]} rows of "
                f"student_weight, got {teacher_weight.shape[0]}"
            )
        teacher = fastrl.Teacher.from_hidden(
            teacher_input,
            teacher_weight,
            bias=teacher_bias,
            beta=self.beta,
            temperature=self.temperature,
        )
        both = self.return_soft_hard_loss
        needs_hard, needs_soft = both or self.weight_hard_loss, both or self.weight_soft_loss
        same_logits = self.temperature == 1 and not missing
        loss: Tensor | float = 0.0
        soft = hard = None
        if needs_soft:
            weight, bias = student_weight, student_bias
            if missing:  # Liger's student has logits of 0 there
                weight = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])
                bias = None if bias is None else torch.cat([bias, bias.new_zeros(missing)])
            hard_weight = self.weight_hard_loss if same_logits else 0.0
            found = self._pass(student_input, weight, true_labels, bias, hard_weight, teacher)
            loss, soft, hard = found
        if not needs_soft or (needs_hard and not same_logits):
            of_labels, _, hard = self._pass(
                student_input, student_weight, true_labels, student_bias, self.weight_hard_loss
            )
            loss = loss + of_labels
        assert isinstance(loss, Tensor)
        if not both:
            return loss
        assert soft is not None
        assert hard is not None
        return loss, soft, hard

    def _pass(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        hard_weight: float,
        teacher: fastrl.Teacher | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the weighted loss of one set of logits, and its two parts without weights."""
        active = labels != self.ignore_index
        coefficient = 0.0 if teacher is None else self.weight_soft_loss
        result = fastrl.linear_policy_loss(
            hidden,
            weight,
            labels,
            torch.full(labels.shape, hard_weight, dtype=torch.float32, device=labels.device),
            active,
            bias=bias,
            metrics=self.return_soft_hard_loss,
            temperature=1.0 if teacher is None else self.temperature,
            ignore_index=self.ignore_index,
            objective=fastrl.Objective(surrogate="reinforce", teacher_coef=coefficient),
            teacher=teacher,
        )
        if not self.return_soft_hard_loss:
            return result.loss, None, None
        hard = -fastrl.masked_mean(result.logprobs, active)
        return result.loss, result.metrics.get("divergence"), hard
