"""TRL's trainers that call their models with `fused_lm_head=True`, on fastrl.

TRL computes the loss and logs its metrics from the values that fastrl returns for the tokens, when
its `compute_loss` calls the model and the reference model.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fastrl.integrations.support import Support
from fastrl.integrations.trl.handle import Choices, Handle
from fastrl.integrations.trl.other_trainers import way_on
from fastrl.integrations.trl.token_outputs import token_outputs

SUPPORT: tuple[Support, ...] = (
    Support(
        option='`SFTTrainer`, `loss_type="nll"` and `"dft"`, `packing`, `padding_free`, '
        "`completion_only_loss`",
        handling="primitive",
        note="a token counts in `mean_token_accuracy` if no logit is greater; of equal logits TRL "
        "counts the first alone",
    ),
    Support(
        option="`SFTTrainer` with `label_smoothing_factor` or `compute_loss_func`",
        handling="unchanged",
        note="TRL computes the loss from the logits; fastrl computes its metrics",
    ),
    Support(
        option="`DPOTrainer`, every `loss_type`, `use_weighting`, `ld_alpha`, "
        "`precompute_ref_log_probs`",
        handling="primitive",
        note="`precompute_ref_log_probs=True` runs in the constructor, without fastrl",
    ),
    Support(
        option="`KTOTrainer`, every `loss_type`, `precompute_ref_log_probs`",
        handling="primitive",
        note="as for `DPOTrainer`. The `logits/*` metrics of both trainers cost one product with "
        "the mean row of the head, or under a softcap one more pass over the logits",
    ),
    Support(
        option="`AsyncGRPOTrainer`",
        handling="primitive",
        note="the loss of a micro-batch was compared with TRL's. The trainer itself needs a GPU "
        "with FlashAttention 3, and was not run",
    ),
    Support(
        option="a subclass of these trainers with its own `compute_loss`",
        handling="primitive",
        note="the first loss raises an error if it does not call the model with "
        "`fused_lm_head=True`",
    ),
)

#: The outputs that each trainer reads from its model; from the reference model only `log_probs`.
_OUTPUTS = {
    "SFTTrainer": ("log_probs", "entropy", "is_top1"),
    "DPOTrainer": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "KTOTrainer": ("log_probs", "entropy", "mean_logits"),
    "AsyncGRPOTrainer": ("log_probs", "entropy"),
}


class TokenHandle(Handle):
    """A trainer whose models compute log-probabilities with fastrl until `undo()`.

    Attributes:
        fused: False.
    """

    answers = True

    def __init__(self, trainer: Any, base: type, choices: Choices) -> None:
        """Replace `compute_loss` of an instance of the class `base`, one of `_OUTPUTS`."""
        _refuse_other_losses(trainer, base)
        reason = f"TRL computes the loss of a {base.__name__}, from log-probabilities"
        super().__init__(trainer, choices, reason)
        self._wanted = _OUTPUTS[base.__name__]
        if getattr(trainer, "use_weighting", False):
            self._wanted += ("log_sum_sq_probs",)
        self._temperature = trainer.temperature if base.__name__ == "AsyncGRPOTrainer" else 1.0
        self._own_loss = self.replace_method("compute_loss", self._loss)

    def _loss(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        reference = getattr(self.trainer, "ref_model", None)
        with contextlib.ExitStack() as stack:
            outputs = stack.enter_context(self._answering(model, self._wanted))
            if reference is not None:
                stack.enter_context(self._answering(reference, ("log_probs",)))
            result = self._own_loss(model, *arguments, **options)
        if not outputs:
            raise RuntimeError(
                f"the loss of this {type(self.trainer).__name__} calls its model without "
                "`fused_lm_head=True`, which use_fastrl answers: call `undo()`"
            )
        return result

    def _answering(
        self, model: nn.Module, wanted: tuple[str, ...]
    ) -> AbstractContextManager[list[Any]]:
        score = functools.partial(
            token_outputs,
            self.trainer,
            wanted=wanted,
            temperature=self._temperature,
            backend=self.backend,
        )
        return self.models.answering(model, score)


def _refuse_other_losses(trainer: Any, base: type) -> None:
    """Refuse TRL's own subclasses that compute logits (`GKDTrainer`, ...)."""
    kinds = type(trainer).__mro__
    for kind in kinds[: kinds.index(base)]:
        if kind.__module__.startswith("trl.") and "compute_loss" in kind.__dict__:
            raise ValueError(
                f"{kind.__name__} has another loss than {base.__name__}: {way_on(trainer)}"
            )
