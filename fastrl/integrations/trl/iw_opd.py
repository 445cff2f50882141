"""TRL's experimental `IWOPDTrainer` on fastrl.

Its `compute_loss` calls student and teacher for the logits of all tokens. The instance gets another
method. For sampled tokens it computes log-probabilities, which TRL's code weights; for whole
distributions it computes the divergence with its gradient.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastrl.integrations.support import Support
from fastrl.integrations.transformers import LmHead, inside_forward
from fastrl.integrations.trl.gkd import mean_divergence
from fastrl.integrations.trl.handle import Choices, LossHandle, refuse_no_teacher, with_globals
from fastrl.integrations.trl.two_models import Side
from fastrl.ops.linear_token_stats import linear_token_logprobs

_OF_TOKENS = "_compute_iw_opd_loss"
METHODS = ("compute_loss", _OF_TOKENS, "generalized_jsd_loss")


def _is_of_tokens(trainer: Any) -> bool:
    return bool(trainer.distillation_objective == "iw_opd")


_REFUSED = (
    Support(
        option="`IWOPDTrainer` with `use_teacher_server=True`",
        handling="refused",
        note="its teacher is a server. `fastrl.linear_policy_loss` takes advantages from the "
        "server's log-probabilities, and `fastrl.linear_divergence` a `fastrl.Teacher.from_top_k` "
        "of its tokens",
        applies=lambda t: bool(t.use_teacher_server),
    ),
    Support(
        option='`IWOPDTrainer` with `distillation_objective="jsd"` and `loss_top_k > 0`, TRL\'s '
        "default",
        handling="refused",
        note="the divergence over a few tokens first needs the likeliest tokens of both models. "
        "`loss_top_k=0` covers all tokens, and `fastrl.linear_divergence` compares with a "
        "`fastrl.Teacher.from_top_k`",
        applies=lambda t: not _is_of_tokens(t) and t.loss_top_k > 0,
    ),
)

SUPPORT: tuple[Support, ...] = (
    Support(
        option='`IWOPDTrainer` of `trl.experimental`, `distillation_objective="iw_opd"`',
        handling="primitive",
        note="fastrl computes the log-probabilities of student and teacher without logits",
    ),
    Support(
        option='`IWOPDTrainer`, `distillation_objective="jsd"` with `loss_top_k=0`, any `beta`, '
        "`temperature`, `lmbda`",
        handling="fused",
        note="without the logits of either model",
    ),
    *_REFUSED,
)


class _KnownLogprobs:
    """A stand-in for the logits, which TRL's code divides, normalizes and gathers from."""

    def __init__(self, logprobs: Tensor) -> None:
        self._logprobs = logprobs

    def __truediv__(self, _: float) -> _KnownLogprobs:
        return self

    def gather(self, dim: int, index: Tensor) -> Tensor:
        """Return the log-probabilities of the tokens, `[B, K, 1]`."""
        return self._logprobs.unsqueeze(dim)


class IwOpdHandle(LossHandle):
    """An `IWOPDTrainer` that runs on fastrl until `undo()`."""

    def __init__(self, trainer: Any, base: type, choices: Choices) -> None:
        """Replace the loss of an instance of the class `base`."""
        if "log_softmax" not in getattr(base, _OF_TOKENS).__code__.co_names:
            raise ValueError(
                f"{base.__name__}.{_OF_TOKENS} of this version of TRL does not call F.log_softmax, "
                "which use_fastrl replaces"
            )
        if not trainer.use_teacher_server:
            refuse_no_teacher(trainer)
        weights = "TRL weights the log-probabilities of the tokens"
        super().__init__(trainer, choices, weights if _is_of_tokens(trainer) else None, _REFUSED)
        normalized = SimpleNamespace(log_softmax=lambda known, dim: known)
        self._of_tokens = with_globals(getattr(trainer, _OF_TOKENS), F=normalized)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], count: Tensor | int | None
    ) -> Tensor:
        """Return the loss of a batch; TRL logs its metrics."""
        trainer = self.trainer
        trainer._raise_if_local_teacher_tokenizer_mismatch()
        start = trainer._compute_prompt_length(inputs)
        labels, token_ids = inputs["labels"][:, start:], inputs["input_ids"][:, start:]
        mask = labels != -100
        of_models = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        if not _is_of_tokens(trainer):
            temperature = trainer.temperature
            return mean_divergence(
                trainer, model, of_models, mask, count, temperature, self.backend
            )

        def score(hidden: Tensor, head: LmHead) -> Tensor:
            return linear_token_logprobs(
                Side(hidden, head).before_last(token_ids.shape[1]).hidden,
                token_ids=token_ids,
                temperature=trainer.temperature,
                mask=mask,
                backend=self.backend,
                **head.arguments(),
            )

        with trainer.accelerator.autocast():
            logprobs = inside_forward(model, score, **of_models)
            trainer.teacher_model.eval()
            with torch.no_grad():
                of_teacher = inside_forward(trainer.teacher_model, score, **of_models)
        sampled = inputs.get("rollout_logprobs")
        loss = self._of_tokens(
            student_logits=_KnownLogprobs(logprobs),
            completion_tokens=token_ids,
            labels=labels,
            teacher_actual_logprobs=of_teacher,
            rollout_logprobs=None if sampled is None else sampled[:, start:],
            num_items_in_batch=count,
        )
        return cast("Tensor", loss)
