"""A teacher in the form that the operators take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.checks import can_read
from fastrl.contract import RowArguments, TeacherScaling


class TeacherArguments(NamedTuple):
    """A teacher's hidden states and head, its logits, or its log-probabilities of some tokens.

    Rows are `[N]`, or `[B, T]` with logits `[B, T, V]`.
    """

    teacher_hidden: Tensor | None  # [N, H]
    teacher_weight: Tensor | None
    teacher_bias: Tensor | None
    teacher_lora_a: Tensor | None
    teacher_lora_b: Tensor | None
    teacher_lora_scale: float
    teacher_logits: Tensor | None  # [N, V] or [B, T, V]
    teacher_ids: Tensor | None  # int64 [N, K]
    teacher_logprobs: Tensor | None  # [N, K]
    has_tail: bool  # all other tokens together are one more event
    scaling: TeacherScaling
    teacher_operand_dtype: torch.dtype | None
    beta: float

    # not a property: torch.compile in torch 2.10 cannot trace properties of a NamedTuple
    def given(self) -> bool:
        """Return whether there is a teacher."""
        return not all(
            x is None for x in (self.teacher_hidden, self.teacher_logits, self.teacher_logprobs)
        )

    def flat(self) -> tuple[Any, ...]:
        """Return the arguments of an operator."""
        at = self._fields.index("scaling")
        return (*self[:at], *self.scaling, *self[at + 1 :])

    def check_tokens(self, active: Tensor, vocabulary: int) -> None:
        """Raise on a CPU if an active row `[N]` has invalid top-k values."""
        ids, logprobs = self.teacher_ids, self.teacher_logprobs
        if ids is None or logprobs is None or not (can_read(ids) and can_read(active)):
            return
        ids, logprobs = ids[active], logprobs[active].double()
        outside = (ids < 0) | (ids >= vocabulary)
        if bool(outside.any()):
            raise ValueError(
                f"teacher.token_ids must lie in [0, {vocabulary}), got {int(ids[outside][0])}"
            )
        ordered = ids.sort(-1).values
        repeated = ordered[:, 1:] == ordered[:, :-1]
        if bool(repeated.any()):
            token = int(ordered[:, 1:][repeated][0])
            raise ValueError(f"teacher.token_ids must not repeat an id in a row, got {token} twice")
        # logarithms are rounded: in bfloat16 the mass may be some percent above 1
        most = logprobs.exp().sum(-1)
        limit = 1 + max(1e-3, 16 * torch.finfo(self.teacher_logprobs.dtype).eps)  # type: ignore[union-attr]
        if bool((most > limit).any()):
            raise ValueError(
                "teacher.logprobs must be log-probabilities, which sum to at most 1, "
                f"got {float(most.max()):.6g}"
            )

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors, which autograd saves."""
        return (*(getattr(self, name) for name in _TENSORS), self.scaling.teacher_temperatures)

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> TeacherArguments:
        """Return the arguments with these instead of `tensors()`."""
        *named, temperatures = tensors
        scaling = self.scaling._replace(teacher_temperatures=temperatures)
        changed: dict[str, Any] = dict(zip(_TENSORS, named, strict=True))
        return self._replace(**changed, scaling=scaling)

    def rows(self, rows: RowArguments) -> RowArguments:
        """Return the student's rows with the teacher's scaling."""
        temperatures, temperature, logit_scale, logit_softcap = self.scaling
        return rows._replace(
            temperatures=temperatures,
            temperature=temperature,
            logit_scale=logit_scale,
            logit_softcap=logit_softcap,
        )


def can_be_flat(logits: Tensor) -> bool:
    """Return whether `[B, T, V]` are `[B T, V]` without a copy."""
    batch, tokens = logits.shape[:2]
    return min(batch, tokens) <= 1 or logits.stride(0) == tokens * logits.stride(1)


#: No teacher.
NOBODY = TeacherArguments(
    teacher_hidden=None,
    teacher_weight=None,
    teacher_bias=None,
    teacher_lora_a=None,
    teacher_lora_b=None,
    teacher_lora_scale=1.0,
    teacher_logits=None,
    teacher_ids=None,
    teacher_logprobs=None,
    has_tail=False,
    scaling=TeacherScaling(None, 1.0, 1.0, 0.0),
    teacher_operand_dtype=None,
    beta=0.0,
)
#: The fields with tensors, beside `scaling.teacher_temperatures`.
_TENSORS = tuple(
    name
    for name in TeacherArguments._fields
    if name not in ("teacher_lora_scale", "has_tail", "scaling", "teacher_operand_dtype", "beta")
)
