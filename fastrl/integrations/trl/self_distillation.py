"""TRL's experimental `SDFTTrainer` and `SDPOTrainer` on fastrl.

Their methods pass the logits of student and teacher to a few functions that return a number for
each token. The instance gets copies of these methods, which find fastrl's functions under the same
names and pass them a description of the model call instead of the logits. TRL's code still weights
and averages the numbers, and logs its metrics.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fastrl import Teacher
from fastrl.integrations.support import Support
from fastrl.integrations.transformers import LmHead, inside_forward, lm_head
from fastrl.integrations.transformers.wrappers import causal_model
from fastrl.integrations.trl.handle import Choices, Handle, with_globals
from fastrl.integrations.trl.top_tokens import top_k_teacher
from fastrl.integrations.trl.two_models import Side, inside_both
from fastrl.ops.linear_token_stats import linear_token_stats

#: Methods that are copied: those that read logits.
_READERS = ("_compute_self_distillation_loss", "_compute_policy_loss", "_compute_rollout_logps")
_FORWARD = "_forward_logits"
_FORWARDS = "_compute_teacher_student_logits"
METHODS = ("compute_loss", "_compute_self_distillation_loss", _FORWARD, _FORWARDS)

_TOKENS = "selective_log_softmax"
_SAMPLED = "compute_sampled_token_self_distillation_loss"
_FULL = "compute_full_logit_self_distillation_loss"
_TOP_K = "compute_topk_self_distillation_loss"

_SERVER = Support(
    option="`SDFTTrainer` and `SDPOTrainer` with `use_teacher_server=True`",
    handling="refused",
    note="their teacher is a server. `fastrl.linear_divergence(..., "
    "teacher=fastrl.Teacher.from_top_k(...))` compares with the server's answers",
    applies=lambda t: bool(t.use_teacher_server),
)

SUPPORT: tuple[Support, ...] = (
    Support(
        option="`SDFTTrainer` and `SDPOTrainer` of `trl.experimental`, every `distillation_mode`, "
        "`distillation_alpha`, `distillation_weight`, `distillation_is_clip`, `teacher_model_kind`",
        handling="primitive",
        note="fastrl computes divergences and log-probabilities without logits. With "
        '`distillation_mode="topk_logits"`, one more projection first finds the student\'s '
        "likeliest tokens. A teacher that is the student itself runs before the student",
    ),
    _SERVER,
)


_REASON = "TRL weights the divergences of the tokens"


class NoLogits:
    """A stand-in for logits in TRL's code: the call of a model that would return them.

    Attributes:
        model: the model of the call.
        inputs: keyword arguments of the model.
        count: the number K of last tokens that are scored.
        mask: the scored ones among these tokens, `[B, K]`; at first all but padding.
        logprobs: log-probabilities of the tokens, `[B, K]`, once they are computed.
        divergence: the divergence from the teacher, `[B, K]`, or None.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Tensor], count: int) -> None:
        self.model = model
        self.inputs = inputs
        self.count = count
        self.mask = inputs["attention_mask"][:, -count:]
        self.logprobs: Tensor | None = None
        self.divergence: Tensor | None = None

    @property
    def token_ids(self) -> Tensor:
        """The tokens, `[B, K]`."""
        return self.inputs["input_ids"][:, -self.count :]

    def sum(self) -> Tensor:
        """Return a number with the student's graph, which TRL multiplies by 0."""
        return cast("Tensor", self.logprobs).sum()


class SelfDistillationHandle(Handle):
    """An `SDFTTrainer` or `SDPOTrainer` that runs on fastrl until `undo()`."""

    def __init__(self, trainer: Any, base: type, choices: Choices) -> None:
        """Replace the methods that call models or read logits."""
        functions = getattr(base, METHODS[1]).__globals__
        missing = [name for name in (_TOKENS, _SAMPLED, _FULL, _TOP_K) if name not in functions]
        if missing:
            raise ValueError(
                f"{base.__name__} of this version of TRL does not call {', '.join(missing)}, "
                "which use_fastrl replaces"
            )
        super().__init__(trainer, choices, _REASON, (_SERVER,))
        for name in _READERS:
            if hasattr(trainer, name):
                own = getattr(trainer, name)
                self.replace_method(name, with_globals(own, **self._functions(own)))
        self.replace_method(_FORWARD, self._no_logits)
        self._forwards = self.replace_method(_FORWARDS, self._both)

    def _both(self, *given: Any, **options: Any) -> Any:
        found = self._forwards(*given, **options)
        self._compare(found.student_logits, found.teacher_logits, found.loss_mask)
        return found

    def _functions(self, method: Any) -> dict[str, Any]:
        """Return the functions that a copied method finds in place of functions of logits."""

        def logprobs(logits: Any, _: Tensor) -> Tensor:
            if logits.logprobs is None:
                logits.logprobs = self._logprobs(logits)
            return cast("Tensor", logits.logprobs)

        def divergence(student: NoLogits, *_: Any, **__: Any) -> Tensor:
            return cast("Tensor", student.divergence)

        names = {_TOKENS: logprobs, _FULL: divergence, _TOP_K: divergence}
        sampled = method.__func__.__globals__.get(_SAMPLED)
        return {**names, _SAMPLED: with_globals(sampled, **{_TOKENS: logprobs})}

    def _no_logits(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
    ) -> NoLogits:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return NoLogits(model, inputs, logits_to_keep)

    def _logprobs(self, logits: NoLogits) -> Tensor:
        def score(hidden: Tensor, head: LmHead) -> Tensor:
            return self._stats(logits, Side(hidden, head).before_last(logits.count))[0]

        with self.trainer.accelerator.autocast():
            return inside_forward(logits.model, score, **logits.inputs)

    def _stats(
        self, student: NoLogits, side: Side, teacher: Teacher | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities, and divergences if there is a teacher."""
        stats = linear_token_stats(
            side.hidden,
            token_ids=student.token_ids,
            outputs=("logprobs",) if teacher is None else ("logprobs", "divergence"),
            temperature=self.trainer.temperature,
            mask=student.mask,
            teacher=teacher,
            backend=self.backend,
            **side.head.arguments(),
        )
        return cast("Tensor", stats.logprobs), stats.divergence

    def _compare(self, student: NoLogits, teacher: NoLogits, mask: Tensor) -> None:
        """Compute the values of both models for the loss, with one call of each."""
        if getattr(self.trainer.args, "distillation_weight", 1.0) == 1:  # no other loss
            student.mask = teacher.mask = mask
        context = self.trainer._get_teacher_context_for_self_distillation
        if self.trainer.args.distillation_mode == "sampled_token":
            student.logprobs = self._logprobs(student)
            with torch.no_grad(), context():
                teacher.logprobs = self._logprobs(teacher)
            return

        def compared(of_student: Side, of_teacher: Side) -> tuple[Tensor, Tensor | None]:
            side = of_student.before_last(student.count)
            return self._stats(student, side, self._teacher(side, of_teacher, student.mask))

        causal = causal_model(student.model)
        with self.trainer.accelerator.autocast():
            if causal is not causal_model(teacher.model):

                def with_states(a: Side, b: Side) -> tuple[Tensor, Tensor | None]:
                    return compared(a, b.before_last(teacher.count))

                found = inside_both(
                    student.model, teacher.model, with_states, student.inputs, teacher.inputs
                )
            else:
                with torch.no_grad(), context():
                    states = inside_forward(
                        teacher.model,
                        lambda hidden, head: Side(hidden, head).before_last(teacher.count).hidden,
                        **teacher.inputs,
                    )

                def with_itself(hidden: Tensor, head: LmHead) -> tuple[Tensor, Tensor | None]:
                    with context():  # the adapter of the teacher, in the same head
                        of_teacher = lm_head(causal)
                    return compared(Side(hidden, head), Side(states, of_teacher))

                found = inside_forward(student.model, with_itself, **student.inputs)
        student.logprobs, student.divergence = found

    def _teacher(self, student: Side, teacher: Side, mask: Tensor) -> Teacher:
        """Return the teacher for the comparison with the student."""
        options = self.trainer.args
        shared = {"beta": options.distillation_alpha, "temperature": self.trainer.temperature}
        if options.distillation_mode == "topk_logits":
            return top_k_teacher(
                student,
                teacher,
                mask,
                options.distillation_topk,
                has_tail=options.distillation_add_tail,
                **shared,
            )
        head = teacher.head
        if self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled:
            head = _copied(head)  # the backward reads it after its module has freed it
        return Teacher.from_hidden(teacher.hidden, **shared, **head.arguments())


def _copied(head: LmHead) -> LmHead:
    a_b = head.lora and (head.lora[0].detach().clone(), head.lora[1].detach().clone(), head.lora[2])
    bias = None if head.bias is None else head.bias.detach().clone()
    return head._replace(weight=head.weight.detach().clone(), bias=bias, lora=a_b)
