"""TRL's `GRPOTrainer` and `RLOOTrainer` on fastrl.

Two methods of the instance are replaced: `_get_per_token_logps_and_entropies`, which runs TRL's own
method on a model whose forward uses fastrl, and, if the configuration allows it, `_compute_loss`.
TRL's code still logs the metrics, from fastrl's log-probabilities and entropies. fastrl adds one
metric, the share of log-ratios that saturate in the fused loss where TRL's would overflow.
"""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fastrl import KeptTokens
from fastrl.integrations.transformers import LmHead
from fastrl.integrations.trl.centering import log_centering, refuse_uncentered
from fastrl.integrations.trl.handle import Choices, Handle
from fastrl.integrations.trl.loss import accumulated, can_be_fused, loss_of
from fastrl.integrations.trl.replay import Replay, kept_of
from fastrl.integrations.trl.rules import OWN_LOSS, PRIMITIVE, why_not_fused
from fastrl.integrations.trl.saturation import (
    count_saturated,
    has_ratios,
    log_saturated,
    warn_of_saturation,
)
from fastrl.integrations.trl.token_outputs import token_outputs

_SCORES = "_get_per_token_logps_and_entropies"
_LOSS = "_compute_loss"
_ARGUMENTS = (
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
)

#: The number of calls that compare the fused loss with TRL's value, which is computed anyway.
_COMPARED_CALLS = 16


def _warn_of_kept_tokens(trainer: Any) -> None:
    """Warn if the sampler normalizes over fewer tokens than the loss, where a replay can mend it.

    With vLLM, TRL corrects for a part of the difference.
    """
    unused = {"top_p": (None, 1.0), "top_k": (None, 0), "min_p": (None, 0.0)}
    found = [f"{name}={x}" for name in unused if (x := getattr(trainer, name)) not in unused[name]]
    if found and not trainer.use_vllm:
        warnings.warn(
            f"{', '.join(found)}: TRL samples from fewer tokens than its log-probabilities are "
            "normalized over, which biases the ratios; use_fastrl(trainer, replay_kept_tokens=True)"
            " computes them over the tokens that the sampler kept",
            stacklevel=5,  # the call of use_fastrl
        )


class PolicyHandle(Handle):
    """A `GRPOTrainer` or `RLOOTrainer` that runs on fastrl until `undo()`.

    Attributes:
        fused: whether fastrl computes loss and gradient. TRL still computes the loss of a batch
            with unknown inputs, and of every batch while a callback has set an option that cannot
            be fused.
    """

    leaves_loss = True
    answers = True

    def __init__(self, trainer: Any, base: type, choices: Choices) -> None:
        """Replace the methods of the instance."""
        _refuse_other_methods(trainer, base)
        super().__init__(trainer, choices, why_not_fused(trainer, (OWN_LOSS, *PRIMITIVE)))
        refuse_uncentered(trainer, choices, self.reason)
        self._choices = choices
        records = choices.replay_kept_tokens or choices.score_centering
        self._replay = replay = Replay(trainer, choices) if records else None
        self.models.counts_positions = replay is not None
        if not choices.replay_kept_tokens:
            _warn_of_kept_tokens(trainer)
        self._temperature = trainer.temperature  # TRL also reads it once
        self._fusing: dict[str, Any] | None = None  # the batch whose loss is being computed
        self._outputs: Any = None  # the model's outputs for that batch
        self._comparisons = 0
        self._warned_of_saturation = False
        self._scores = self.replace_method(_SCORES, self._score)
        self._loss = getattr(trainer, _LOSS)
        if self.fused or replay is not None:
            self.replace_method(_LOSS, self._compute_loss)
        for name, function in ({} if replay is None else replay.methods).items():
            self.replace(trainer, name, function)

    def undo(self) -> None:
        """Restore the trainer's methods; a second call does nothing.

        Methods that have been patched since then are kept, and call TRL's.
        """
        if self._replay is not None:
            self._replay.undo()
        super().undo()

    def _score(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **options: Any,
    ) -> Any:
        """Run TRL's method, whose calls of the model fastrl answers for the last K tokens."""
        sets = None if self._replay is None else self._replay.sets(len(input_ids))

        def score(token_ids: Tensor) -> Callable[[Tensor, LmHead], dict[str, Tensor]]:
            nonlocal sets
            token_ids = token_ids[:, -logits_to_keep:]
            kept = None
            if sets is not None:  # TRL splits the batch, and keeps its order
                kept, sets = kept_of(sets[: len(token_ids)], token_ids), sets[len(token_ids) :]
            compute = self._of_tokens(token_ids, kept, with_entropy=compute_entropy)

            def padded(hidden: Tensor, head: LmHead) -> dict[str, Tensor]:
                before = hidden.shape[1] - logits_to_keep
                found = compute(hidden[:, before:], head)
                return {name: pad(x, (before, 0)) if x.ndim > 1 else x for name, x in found.items()}

            return padded

        with self.models.answering(model, score) as outputs:
            result = self._scores(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                **options,
            )
        if not outputs or (self._fusing is not None and len(outputs) != 1):
            raise RuntimeError(
                f"this version of TRL calls its model {len(outputs)} times with "
                "`fused_lm_head=True` for a batch, not once; use_fastrl(trainer, fused=False) "
                "leaves the loss to TRL"
            )
        if self._fusing is not None:
            self._outputs = outputs[0]
        return result

    def _of_tokens(
        self, token_ids: Tensor, kept: KeptTokens | None, *, with_entropy: bool
    ) -> Callable[[Tensor, LmHead], dict[str, Tensor]]:
        if self._fusing is not None:
            return loss_of(self.trainer, self._fusing, self._temperature, self.backend, kept)
        return token_outputs(
            self.trainer,
            token_ids,
            ("log_probs", "entropy") if with_entropy else ("log_probs",),
            temperature=self._temperature,
            backend=self.backend,
            kept=kept,
        )

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        compute = self._fused if self.fused else self._loss
        if self._replay is None:
            return compute(model, inputs)
        with self._replay.of_batch(inputs):
            return compute(model, inputs)

    def _fused(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        known, reason = can_be_fused(inputs), why_not_fused(self.trainer)
        reason = reason if known else f"inputs must be TRL's alone, got {', '.join(inputs)}"
        refuse_uncentered(self.trainer, self._choices, reason)
        if reason is not None:
            loss: Tensor = self._loss(model, inputs)
            if has_ratios(self.trainer, inputs):  # other ranks may add up their counts
                log_saturated(self.trainer, torch.zeros(2, dtype=torch.float32, device=loss.device))
            return loss
        self._fusing = inputs
        try:
            # calls _score, and logs TRL's metrics; its loss depends on the auxiliary loss alone
            theirs = self._loss(model, inputs).detach()
            outputs = self._outputs
        finally:
            self._fusing = self._outputs = None
        fraction = 0.0
        if has_ratios(self.trainer, inputs):
            logprobs = outputs.log_probs[:, -inputs["completion_ids"].shape[1] :]
            saturated = count_saturated(self.trainer, inputs, logprobs)
            # TRL has just read its metrics from the device, so one more read causes no wait
            fraction = log_saturated(self.trainer, saturated)
        loss = outputs.policy_loss
        if outputs.aux_loss is not None:
            weight = self.trainer.router_aux_loss_coef / accumulated(self.trainer)
            loss = loss + weight * outputs.aux_loss
        if outputs.centering is not None:
            theirs = theirs + outputs.centering[0]
            log_centering(self.trainer, outputs.centering)
        if fraction == 0:
            self._compare(loss, theirs)
        elif not self._warned_of_saturation:
            self._warned_of_saturation = True
            warn_of_saturation(self.trainer, fraction)
        return loss

    def _compare(self, fused: Tensor, trls: Tensor) -> None:
        if self._comparisons >= _COMPARED_CALLS:
            return
        self._comparisons += 1
        ours, theirs = fused.item(), trls.item()
        close = math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=1e-3)
        if math.isfinite(theirs) and not close:
            raise RuntimeError(
                f"the fused loss is {ours:.6g} where this version of TRL computes {theirs:.6g}; "
                "use_fastrl(trainer, fused=False) leaves the loss to TRL"
            )


def _refuse_other_methods(trainer: Any, base: type) -> None:
    """Refuse a trainer whose scores are not TRL's, or a TRL that lacks a method."""
    for method in (_SCORES, _LOSS, "compute_loss"):
        if not hasattr(base, method):
            raise ValueError(f"this version of TRL has no {base.__name__}.{method} to replace")
    if _SCORES in trainer.__dict__:
        raise ValueError(f"trainer.{_SCORES} is already replaced; undo that first")
    if getattr(type(trainer), _SCORES) is not getattr(base, _SCORES):
        raise ValueError(
            f"{type(trainer).__name__} overrides {_SCORES}, which would not be called: use_fastrl "
            f"replaces {base.__name__}'s. Call `fastrl.token_logprobs`, or without logits "
            "`fastrl.linear_token_logprobs`, in yours instead"
        )
    if not hasattr(importlib.import_module("trl.trainer.utils"), "add_fused_lm_head"):
        raise ValueError(
            "this version of TRL has no model with `fused_lm_head`, whose forward use_fastrl "
            "replaces; TRL 1.15 and later have"
        )
    parameters = inspect.signature(getattr(base, _SCORES)).parameters
    missing = [argument for argument in _ARGUMENTS if argument not in parameters]
    if missing:
        raise ValueError(
            f"{base.__name__}.{_SCORES} of this version of TRL has no {', '.join(missing)}"
        )
