"""`use_fastrl(trainer)` for TRL's `GRPOTrainer` and `RLOOTrainer`.

trainer = GRPOTrainer(model=..., reward_funcs=..., args=..., train_dataset=...)
use_fastrl(trainer)
trainer.train()

Two methods of the instance are replaced, the ones that TRL's subclasses override:
`_get_per_token_logps_and_entropies`, and `_compute_loss` if the configuration allows it. TRL's
code still logs the metrics, from fastrl's log-probabilities and entropies. One metric is added: the
share of log-ratios that saturate in the fused loss where TRL's would overflow.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fastrl import PolicyLoss
from fastrl.backend import Backend
from fastrl.integrations.transformers import lm_head, modules_with_silent_hooks
from fastrl.integrations.trl.loss import FUSED_INPUTS, fused_loss
from fastrl.integrations.trl.rules import PRIMITIVE, REFUSED
from fastrl.integrations.trl.rules import SUPPORT as SUPPORT
from fastrl.integrations.trl.saturation import (
    count_saturated,
    log_saturated,
    warn_of_saturation,
)
from fastrl.integrations.trl.scoring import token_stats, within
from fastrl.integrations.undoing import Undoable
from fastrl.ops.linear_token_stats import linear_token_stats

TESTED = "Tested with TRL 1.14, 1.15 and 1.16, on `GRPOTrainer` and `RLOOTrainer` instances."

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

#: Calls in which the fused loss is compared with TRL's own value, which is computed anyway.
_COMPARED_CALLS = 16


def use_fastrl(trainer: Any, *, fused: bool | None = None, backend: Backend = "auto") -> Handle:
    """Let a TRL trainer compute log-probabilities, and its loss if possible, with fastrl.

    In the fused loss, log-ratios saturate at 80 (the two of the bias-corrected KL at 40), where
    TRL's overflow: a run that has diverged continues with finite gradients, where TRL's become NaN.
    The metric `fastrl/saturated_ratio_fraction` is the share of such tokens; the first batch that
    has any gives a RuntimeWarning.

    Hooks on the causal language model, its PEFT wrapper or its LM head do not fire, because only
    the backbone is called and the weight of the head is read. If there are any, a UserWarning
    says so.

    Args:
        trainer: an instance of `GRPOTrainer` or `RLOOTrainer`, before `train()`.
        fused: None computes loss and gradient in one pass where `docs/support.md` says so; True
            requires it; False replaces only log-probabilities and entropies.
        backend: `auto`, or the backend that works on the chunks.

    Returns:
        A handle with `undo()`, which is also a context manager. `fused` says whether the loss is
        fused, `reason` why it is not.

    Raises:
        TypeError: `trainer` is neither of the two.
        ValueError: something about the trainer is not supported; the trainer is unchanged.
    """
    base = _base(trainer)
    _refuse_other_methods(trainer, base)
    for rule in REFUSED:
        if rule.applies is not None and rule.applies(trainer):
            raise ValueError(f"use_fastrl does not support {rule.option}: {rule.note}")
    lm_head(trainer.model)
    if getattr(trainer, "ref_model", None) is not None:
        lm_head(trainer.ref_model)
    one = torch.zeros(1, 1, device=trainer.accelerator.device)
    linear_token_stats(one, one, one[0].long(), backend=backend)  # raises if it cannot run
    unfused = (rule for rule in PRIMITIVE if rule.applies is not None and rule.applies(trainer))
    reason = next((f"{rule.option}: {rule.note}" for rule in unfused), None)
    if fused and reason is not None:
        raise ValueError(f"fused must be None or False with {reason}")
    if fused is False:
        reason = "fused is False"
    return Handle(trainer, reason, backend)


class Handle(Undoable):
    """A trainer that runs on fastrl until `undo()` or the end of a `with` block.

    Attributes:
        fused: whether loss and gradient are computed in one pass.
        reason: why they are not, or None.
    """

    def __init__(self, trainer: Any, reason: str | None, backend: Backend) -> None:
        """Replace the methods of the instance."""
        self.fused = reason is None
        self.reason = reason
        self._trainer = trainer
        self._backend = backend
        self._ready: tuple[Tensor, Tensor | None] | None = None
        self._comparisons = 0
        self._warned_of_saturation = self._warned_of_hooks = False
        self._scores = getattr(trainer, _SCORES)
        self._loss = getattr(trainer, _LOSS)

        @functools.wraps(self._scores)
        def scores(*arguments: Any, **options: Any) -> Any:
            return self._score(*arguments, **options)

        @functools.wraps(self._loss)
        def loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            return self._fused(model, inputs)

        self._set = {_SCORES: scores, _LOSS: loss} if self.fused else {_SCORES: scores}
        for name, function in self._set.items():
            setattr(trainer, name, function)
        self._warn_of_hooks()

    def undo(self) -> None:
        """Restore the trainer's methods; a second call does nothing."""
        for name, function in self._set.items():
            if self._trainer.__dict__.get(name) is function:
                delattr(self._trainer, name)

    def _score(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        if self._ready is not None:
            return *self._ready, None
        if compute_aux_loss or any(value is not None for value in others.values()):
            arguments = (model, input_ids, attention_mask, logits_to_keep)
            return self._scores(  # type: ignore[no-any-return]
                *arguments,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **others,
            )

        self._warn_of_hooks()

        def of_model(inner: nn.Module) -> tuple[Tensor, Tensor | None]:
            return token_stats(
                self._trainer,
                inner,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size or max(input_ids.shape[0], 1),
                with_entropy=compute_entropy,
                backend=self._backend,
            )

        return *within(self._trainer, model, of_model), None

    def _fused(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not FUSED_INPUTS.issuperset(name for name, x in inputs.items() if x is not None):
            return self._loss(model, inputs)  # type: ignore[no-any-return]

        self._warn_of_hooks()

        def of_model(inner: nn.Module) -> PolicyLoss:
            return fused_loss(self._trainer, inner, inputs, self._backend)

        result = within(self._trainer, model, of_model)
        loss, saturated = result.loss, count_saturated(self._trainer, inputs, result.logprobs)
        self._ready = result.logprobs, result.entropy
        try:
            with torch.no_grad():
                theirs = self._loss(model, inputs)  # logs TRL's metrics
        finally:
            self._ready = None
        # TRL has just read its metrics from the device, so reading one more costs no wait
        fraction = 0.0 if saturated is None else log_saturated(self._trainer, saturated)
        if fraction == 0:
            self._compare(loss, theirs)
        elif not self._warned_of_saturation:
            self._warned_of_saturation = True
            warn_of_saturation(self._trainer, fraction)
        return loss

    def _warn_of_hooks(self) -> None:
        """Warn once; called at every step, as callbacks may add hooks when training begins."""
        if self._warned_of_hooks:
            return
        models = (self._trainer.model, getattr(self._trainer, "ref_model", None))
        found = [
            name
            for model in models
            if model is not None
            for name in modules_with_silent_hooks(model)
        ]
        if found:
            self._warned_of_hooks = True
            names = ", ".join(dict.fromkeys(found))
            warnings.warn(
                f"hooks on {names} do not fire in this trainer's losses and log-probabilities: "
                "fastrl calls the backbone and reads the weight of the LM head; hooks on the "
                "backbone (model.get_decoder()) and its layers do fire",
                stacklevel=4,
            )

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


def _base(trainer: Any) -> type:
    from trl import GRPOTrainer, RLOOTrainer

    base: type
    for base in (GRPOTrainer, RLOOTrainer):
        if isinstance(trainer, base):
            return base
    raise TypeError(
        f"trainer must be an instance of GRPOTrainer or RLOOTrainer, got {type(trainer).__name__}"
    )


def _refuse_other_methods(trainer: Any, base: type) -> None:
    """Refuse a trainer whose methods are not TRL's, or a TRL that lacks one of them."""
    name = type(trainer).__name__
    for method in (_SCORES, _LOSS, "compute_loss"):
        if not hasattr(base, method):
            raise ValueError(f"this version of TRL has no {base.__name__}.{method} to replace")
        if method in trainer.__dict__:
            raise ValueError(f"trainer.{method} is already replaced; undo that first")
        if getattr(type(trainer), method) is not getattr(base, method):
            raise ValueError(
                f"{name} overrides {method}, which would not be called; "
                f"use_fastrl replaces {base.__name__}'s"
            )
    parameters = inspect.signature(getattr(base, _SCORES)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    missing = [argument for argument in _ARGUMENTS if argument not in parameters]
    if missing:
        raise ValueError(
            f"{base.__name__}.{_SCORES} of this version of TRL has no {', '.join(missing)}"
        )
