"""TRL's trainers that call their models with `fused_lm_head=True`, on fastrl.

TRL computes the loss and logs its metrics from the values that fastrl returns for the tokens. The
forward of the model and of the reference model is replaced, and a wrapper of `compute_loss`
prepares both models.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch import nn

from fastrl.integrations.support import Support
from fastrl.integrations.trl.fused_forward import FusedForward
from fastrl.integrations.trl.handle import Choices, Handle, check_models
from fastrl.integrations.trl.other_trainers import way_on
from fastrl.integrations.trl.scoring import CompiledBackbones

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


def token_trainer(trainer: Any, base: type, choices: Choices) -> TokenHandle:
    """Let a trainer of the class `base`, one of `_OUTPUTS`, use fastrl."""
    _refuse_other_losses(trainer, base)
    check_models(trainer, choices.backend)
    reason = f"TRL computes the loss of a {base.__name__}, from log-probabilities"
    if choices.fused:
        raise ValueError(f"fused must be None or False: {reason}")
    wanted = _OUTPUTS[base.__name__]
    if getattr(trainer, "use_weighting", False):
        wanted += ("log_sum_sq_probs",)
    temperature = trainer.temperature if base.__name__ == "AsyncGRPOTrainer" else 1.0
    return TokenHandle(trainer, reason, wanted, temperature, choices)


def _refuse_other_losses(trainer: Any, base: type) -> None:
    """Refuse TRL's own subclasses that compute logits (`GKDTrainer`, ...)."""
    kinds = type(trainer).__mro__
    for kind in kinds[: kinds.index(base)]:
        if kind.__module__.startswith("trl.") and "compute_loss" in kind.__dict__:
            raise ValueError(
                f"{kind.__name__} has another loss than {base.__name__}: {way_on(trainer)}"
            )


class TokenHandle(Handle):
    """A trainer whose models compute log-probabilities with fastrl until `undo()`.

    Attributes:
        fused: False.
        reason: why it is False.
    """

    def __init__(
        self,
        trainer: Any,
        reason: str,
        wanted: tuple[str, ...],
        temperature: float,
        choices: Choices,
    ) -> None:
        """Replace the forward of the models."""
        super().__init__(reason)
        self._trainer = trainer
        compiled = CompiledBackbones(trainer)
        options: dict[str, Any] = {"temperature": temperature, "backend": choices.backend}
        self._policy = FusedForward(trainer, trainer.model, wanted, compiled, **options)
        self._reference: FusedForward | None = None
        if getattr(trainer, "ref_model", None) is not None:
            self._reference = FusedForward(
                trainer, trainer.ref_model, ("log_probs",), compiled, **options
            )
        self._loss = trainer.compute_loss

        @functools.wraps(self._loss)
        def compute_loss(model: nn.Module, *arguments: Any, **options: Any) -> Any:
            return self._compute_loss(model, *arguments, **options)

        for forward in self._forwards():
            self.replace(forward.causal, "forward", forward.forward)
        self.replace(trainer, "compute_loss", compute_loss)
        self._warn_of_hooks()

    def undo(self) -> None:
        """Restore the forward of the models; a second call does nothing."""
        for forward in self._forwards():
            forward.undone = True
        super().undo()

    def _forwards(self) -> list[FusedForward]:
        return [self._policy] if self._reference is None else [self._policy, self._reference]

    def _compute_loss(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        if self.undone:
            return self._loss(model, *arguments, **options)
        self._warn_of_hooks()
        before = self._policy.calls
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._policy.ready(model))
            if self._reference is not None:
                stack.enter_context(self._reference.ready(self._trainer.ref_model))
            result = self._loss(model, *arguments, **options)
        if self._policy.calls == before:
            raise RuntimeError(
                f"the loss of this {type(self._trainer).__name__} calls its model without "
                "`fused_lm_head=True`, which use_fastrl answers: call `undo()`"
            )
        return result

    def _warn_of_hooks(self) -> None:
        self.warn_of_hooks(self._trainer.model, getattr(self._trainer, "ref_model", None))
