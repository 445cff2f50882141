"""Calls with the hidden states and heads of a student and a teacher, inside both forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fastrl.integrations.transformers import LmHead
from fastrl.integrations.transformers.forward import inside_forward

Result = TypeVar("Result")


class Side(NamedTuple):
    """One of the two models: its last hidden states `[B, T, H]` and its LM head."""

    hidden: Tensor
    head: LmHead

    def before_last(self, count: int) -> Side:
        """Return the states that predict the last tokens, `[B, count, H]`."""
        return self._replace(hidden=self.hidden[:, -1 - count : -1])


def inside_both(
    student: nn.Module,
    teacher: nn.Module,
    function: Callable[[Side, Side], Result],
    inputs: dict[str, Any],
    of_teacher: dict[str, Any] | None = None,
) -> Result:
    """Return `function(of_student, of_teacher)`, called in the forwards of two models.

    There the parameters of both heads are whole, even if the models are sharded. The teacher runs
    without gradients; the result of `function` may have gradients for the student.

    Args:
        student: a `transformers` causal language model, as its wrappers returned it.
        teacher: another model.
        function: a function of the two `Side`s, which must not call the models.
        inputs: keyword arguments of the student.
        of_teacher: keyword arguments of the teacher, if they differ.
    """
    differentiable = torch.is_grad_enabled()

    def of_student(hidden: Tensor, head: LmHead) -> Result:
        results: list[Result] = []

        def compare(states: Tensor, head_of_teacher: LmHead) -> Tensor:
            with torch.set_grad_enabled(differentiable):
                results.append(function(Side(hidden, head), Side(states, head_of_teacher)))
            return states.new_zeros(())  # for the teacher's wrappers, which expect no gradient

        with torch.no_grad():
            inside_forward(teacher, compare, **(of_teacher or inputs))
        return results[0]

    return inside_forward(student, of_student, **inputs)
