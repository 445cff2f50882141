"""TRL's `GRPOTrainer` and `RLOOTrainer` on fastrl.

Two methods of the instance are replaced: `_get_per_token_logps_and_entropies`, which runs TRL's own
method on a model whose forward uses fastrl, and, if the configuration allows it, `_compute_loss`.
TRL's code still logs the metrics, from fastrl's log-probabilities and entropies. fastrl adds one
metric, the share of log-ratios that saturate in the fused loss where TRL's would overflow.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.backend import Backend
from fastrl.integrations.trl.handle import Choices, Handle, check_models
from fastrl.integrations.trl.loss import accumulated, can_be_fused, loss_scorer
from fastrl.integrations.trl.replay import Replay
from fastrl.integrations.trl.rules import OWN_LOSS, PRIMITIVE, why_not_fused
from fastrl.integrations.trl.saturation import (
    count_saturated,
    has_ratios,
    log_saturated,
    warn_of_saturation,
)
from fastrl.integrations.trl.scoring import CompiledBackbones, ScoredModel, Scorer, token_scorer

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


def policy_trainer(trainer: Any, base: type, choices: Choices) -> PolicyHandle:
    """Let a `GRPOTrainer` or `RLOOTrainer`, the `base`, use fastrl."""
    _refuse_other_methods(trainer, base)
    check_models(trainer, choices.backend)
    reason = why_not_fused(trainer, (OWN_LOSS, *PRIMITIVE))
    if choices.fused and reason is not None:
        raise ValueError(f"fused must be None or False: {reason}")
    if choices.fused is False:
        reason = "fused is False"
    replay = Replay(trainer) if choices.replay_kept_tokens else None
    if replay is None:
        _warn_of_kept_tokens(trainer)
    return PolicyHandle(trainer, reason, choices.backend, replay)


def _warn_of_kept_tokens(trainer: Any) -> None:
    """Warn if the sampler normalizes over fewer tokens than the loss, where a replay can mend it.

    With vLLM it cannot, and TRL corrects for the difference.
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
    """A trainer that runs on fastrl until `undo()` or the end of a `with` block.

    Attributes:
        fused: whether fastrl computes loss and gradient. TRL still computes the loss of a batch
            with unknown inputs, and of every batch while a callback has set an option that cannot
            be fused.
        reason: why the loss is not fused, or None.
    """

    def __init__(
        self, trainer: Any, reason: str | None, backend: Backend, replay: Replay | None
    ) -> None:
        """Replace the methods of the instance."""
        super().__init__(reason)
        self._trainer = trainer
        self._backend = backend
        self._replay = replay
        self._temperature = trainer.temperature  # TRL also reads it once
        self._fusing: dict[str, Any] | None = None  # the batch whose loss is being computed
        self._outputs: Any = None  # the model's outputs for that batch
        self._compiled = CompiledBackbones(trainer)
        self._comparisons = 0
        self._warned_of_saturation = False
        self._scores = getattr(trainer, _SCORES)
        self._loss = getattr(trainer, _LOSS)

        @functools.wraps(self._scores)
        def scores(*arguments: Any, **options: Any) -> Any:
            return self._score(*arguments, **options)

        @functools.wraps(self._loss)
        def loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            compute = self._fused if self.fused else self._loss
            if replay is None or self.undone:
                return compute(model, inputs)
            with replay.of_batch(inputs):
                return compute(model, inputs)

        methods: dict[str, Any] = {_SCORES: scores}
        if self.fused or replay is not None:
            methods[_LOSS] = loss
        if replay is not None:
            methods |= replay.methods
        for name, function in methods.items():
            self.replace(trainer, name, function)
        self._warn_of_hooks()

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
        """Run TRL's method on a model whose forward uses fastrl."""
        scored = None
        if not self.undone:
            self._warn_of_hooks()
            scorer = self._scorer(with_entropy=compute_entropy)
            sets = None if self._replay is None else self._replay.sets(len(input_ids))
            scored = ScoredModel(self._trainer, model, logits_to_keep, scorer, self._compiled, sets)
        result = self._scores(
            model if scored is None else scored,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            **options,
        )
        if scored is None:
            return result
        if not scored.outputs or (self._fusing is not None and len(scored.outputs) != 1):
            raise RuntimeError(
                f"this version of TRL calls its model {len(scored.outputs)} times for a batch, not "
                "once; use_fastrl(trainer, fused=False) leaves the loss to TRL"
            )
        if self._fusing is not None:
            self._outputs = scored.outputs[0]
        return result

    def _scorer(self, *, with_entropy: bool) -> Scorer:
        choices = (self._temperature, self._backend)
        if self._fusing is not None:
            return loss_scorer(self._trainer, self._fusing, *choices)
        return token_scorer(self._trainer, *choices, with_entropy=with_entropy)

    def _fused(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if self.undone:
            return self._loss(model, inputs)  # type: ignore[no-any-return]
        if not can_be_fused(inputs) or why_not_fused(self._trainer) is not None:
            loss: Tensor = self._loss(model, inputs)
            if has_ratios(self._trainer, inputs):  # other ranks may add up their counts
                log_saturated(
                    self._trainer, torch.zeros(2, dtype=torch.float32, device=loss.device)
                )
            return loss
        self._fusing = inputs
        try:
            # calls _score, and logs TRL's metrics; its loss depends on the auxiliary loss alone
            theirs = self._loss(model, inputs).detach()
            outputs = self._outputs
        finally:
            self._fusing = self._outputs = None
        fraction = 0.0
        if has_ratios(self._trainer, inputs):
            logprobs = outputs.log_probs[:, -inputs["completion_ids"].shape[1] :]
            saturated = count_saturated(self._trainer, inputs, logprobs)
            # TRL has just read its metrics from the device, so one more read causes no wait
            fraction = log_saturated(self._trainer, saturated)
        loss = outputs.loss
        if outputs.aux_loss is not None:
            weight = self._trainer.router_aux_loss_coef / accumulated(self._trainer)
            loss = loss + weight * outputs.aux_loss
        if fraction == 0:
            self._compare(loss, theirs)
        elif not self._warned_of_saturation:
            self._warned_of_saturation = True
            warn_of_saturation(self._trainer, fraction)
        return loss

    def _warn_of_hooks(self) -> None:
        self.warn_of_hooks(self._trainer.model, getattr(self._trainer, "ref_model", None))

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
