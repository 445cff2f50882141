"""A handle with an undo, and checks of models, for all adapters of TRL's trainers."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from fastrl.backend import Backend
from fastrl.integrations.replacing import Undoable
from fastrl.integrations.support import Support
from fastrl.integrations.transformers import lm_head
from fastrl.integrations.transformers.hooks import has_own_hooks
from fastrl.integrations.transformers.wrappers import causal_model, wrappers
from fastrl.integrations.trl.fused_models import FusedModels
from fastrl.integrations.trl.packed_backbones import models_of
from fastrl.integrations.trl.rules import REFUSED, refuse
from fastrl.ops.linear_token_stats import linear_token_stats

logger = logging.get_logger(__name__)

#: Name of the handle among the attributes of a trainer.
_MARK = "_fastrl"


class Choices(NamedTuple):
    """The arguments of `use_fastrl`."""

    fused: bool | None = None
    packed: bool | None = None
    packed_tokens: int | None = None
    replay_kept_tokens: bool = False
    score_centering: int | None = None
    backend: Backend = "auto"


class Handle(Undoable):
    """A trainer that runs on fastrl until `undo()` or the end of a `with` block.

    Attributes:
        leaves_loss: whether the loss can stay TRL's where fastrl could compute it.
        answers: whether TRL calls the models with `fused_lm_head=True`.
        fused: whether fastrl computes loss and gradient in one pass.
        reason: why it does not do so, or None.
        trainer: the trainer.
        backend: the backend that the user asked for.
        models: its models.
        undone: whether `undo` has been called. If a replaced method was wrapped since then, `undo`
            does not find it, so the method checks this and calls the previous method.

    Examples:
        >>> from fastrl.integrations.trl import use_fastrl
        >>> with use_fastrl(trainer) as handle:  # doctest: +SKIP
        ...     trainer.train()
    """

    leaves_loss = False
    answers = False

    def __init__(
        self,
        trainer: Any,
        choices: Choices,
        reason: str | None = None,
        rules: tuple[Support, ...] = (),
        unpacked: str | None = None,
    ) -> None:
        """Check the trainer, and change nothing yet.

        Args:
            trainer: the trainer.
            choices: the arguments of `use_fastrl`.
            reason: why its loss is not fused, or None.
            rules: the rules that refuse trainers of this kind.
            unpacked: why trainers of this kind run on padded batches, or None.

        Raises:
            ValueError: the trainer or one of its models is not supported.
        """
        self._check(trainer, choices, rules)
        if choices.fused and reason is not None:
            raise ValueError(f"fused must be None or False: {reason}")
        if choices.fused is False and reason is None:
            if not self.leaves_loss:
                raise ValueError(
                    f"fused must be None or True for a {type(trainer).__name__}: its loss is a "
                    "divergence, without log-probabilities of tokens to replace"
                )
            reason = "fused is False"
        self.fused = reason is None
        self.reason = reason
        self.trainer = trainer
        self.backend = choices.backend
        self.models = FusedModels(
            trainer, packed=choices.packed, tokens=choices.packed_tokens, reason=unpacked
        )
        self.undone = False
        self._warned_of_hooks = False
        self._replaced: list[tuple[Any, str, Any, tuple[Any, ...]]] = []

    @property
    def packed(self) -> bool:
        """Whether models run on rows without padding."""
        return self.packed_reason is None

    @property
    def packed_reason(self) -> str | None:
        """Why they do not, or None."""
        return self.models.packing.reason

    def announce(self) -> None:
        """Tell the user about hooks and packing, once all methods are replaced."""
        self.trainer.__dict__[_MARK] = self
        self._warn_of_hooks()
        _say(self)

    def replace(self, owner: Any, name: str, function: Any) -> None:
        """Set an attribute of an instance until `undo`."""
        previous = (owner.__dict__[name],) if name in owner.__dict__ else ()
        self._replaced.append((owner, name, function, previous))
        owner.__dict__[name] = function

    def replace_method(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Replace a method of the trainer, and return its own.

        Models run compiled, packed or both while the function runs, as `FusedModels` says.
        """
        own: Callable[..., Any] = getattr(self.trainer, name)

        @functools.wraps(own)
        def until_undone(*arguments: Any, **options: Any) -> Any:
            if self.undone:
                return own(*arguments, **options)
            self._warn_of_hooks()
            given = (x for x in (*arguments, *options.values()) if isinstance(x, nn.Module))
            models = {causal_model(model): model for model in (*models_of(self.trainer), *given)}
            with self.models.running(*models.values()):
                return function(*arguments, **options)

        self.replace(self.trainer, name, until_undone)
        return own

    def undo(self) -> None:
        """Restore the trainer's methods; a second call does nothing.

        Methods that have been patched since then are kept, and call TRL's.
        """
        if self.trainer.__dict__.get(_MARK) is self:
            del self.trainer.__dict__[_MARK]
        self.undone = True
        while self._replaced:
            owner, name, function, previous = self._replaced.pop()
            if owner.__dict__.get(name) is not function:
                continue
            if previous:
                owner.__dict__[name] = previous[0]
            else:
                del owner.__dict__[name]

    def _warn_of_hooks(self) -> None:
        """Warn once; called at every step, as callbacks may add hooks when training begins."""
        if not self._warned_of_hooks:
            self._warned_of_hooks = _warn_of_hooks(models_of(self.trainer))

    def _check(self, trainer: Any, choices: Choices, rules: tuple[Support, ...]) -> None:
        """Refuse a trainer that cannot run on fastrl, and a backend that cannot run."""
        if _MARK in trainer.__dict__:
            raise ValueError(
                f"the loss of this {type(trainer).__name__} is already replaced; undo that first"
            )
        refuse(trainer, *REFUSED, *rules)
        _check_packed_tokens(trainer, choices)
        for model in models_of(trainer):
            lm_head(model)
            if self.answers and not any(map(_takes_fused_lm_head, wrappers(model))):
                raise ValueError(
                    f"the forward of this {type(causal_model(model)).__name__} has no "
                    "`fused_lm_head`, which use_fastrl answers: this version of TRL computes logits"
                )
        one = torch.zeros(1, 1, dtype=torch.float32, device=trainer.accelerator.device)
        linear_token_stats(one, one, one[0].long(), backend=choices.backend)


class LossHandle(Handle):
    """A trainer whose `compute_loss` is replaced, except in calls that ask for the outputs."""

    def __init__(
        self,
        trainer: Any,
        choices: Choices,
        reason: str | None = None,
        rules: tuple[Support, ...] = (),
    ) -> None:
        """Replace the method of the instance."""
        super().__init__(trainer, choices, reason, rules)
        self._own_loss = self.replace_method("compute_loss", self._loss)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], count: Tensor | int | None
    ) -> Tensor:
        """Return the loss of a batch; `count` is TRL's `num_items_in_batch`."""
        raise NotImplementedError

    def _loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if return_outputs:
            return self._own_loss(model, inputs, return_outputs, num_items_in_batch)
        return self.compute_loss(model, inputs, num_items_in_batch)


def refuse_no_teacher(trainer: Any) -> None:
    """Refuse a trainer without a model to compare with."""
    if trainer.teacher_model is None:
        raise ValueError(f"{type(trainer).__name__} has no teacher_model to compare with")


def check_positive(name: str, value: object) -> None:
    """Raise if an argument that is not None is not an integer above 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be None or an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _check_packed_tokens(trainer: Any, choices: Choices) -> None:
    if not (choices.packed is None or isinstance(choices.packed, bool)):
        raise TypeError(f"packed must be None or a bool, got {type(choices.packed).__name__}")
    tokens = choices.packed_tokens
    if tokens is None:
        return
    check_positive("packed_tokens", tokens)
    if choices.packed is False:
        raise ValueError(f"packed_tokens must be None with packed=False, got {tokens}")
    if trainer.accelerator.num_processes > 1:
        raise ValueError(
            f"packed_tokens must be None on {trainer.accelerator.num_processes} processes, got "
            f"{tokens}: ranks would call their layers a different number of times"
        )


def _say(handle: Handle) -> None:
    """Log once whether the models are packed, and what keeps completions from sharing prompts."""
    if not handle.trainer.accelerator.is_main_process:
        return
    name = type(handle.trainer).__name__
    if handle.packed_reason is not None:
        logger.warning(f"{name} runs on padded batches: {handle.packed_reason}")
        return
    options, lost = handle.trainer.args, ""
    parts = getattr(options, "steps_per_generation", None) or 1
    if parts > 1:
        lost = (
            f". TRL spreads the completions of a prompt over {parts} batches, and only those in "
            "one batch share it"
        )
    together = options.gradient_accumulation_steps if parts > 1 else 1
    if together > 1 and parts % together == 0:
        size = options.per_device_train_batch_size * together
        lost += (
            f": per_device_train_batch_size={size}, gradient_accumulation_steps=1 and "
            f"steps_per_generation={parts // together} make one batch of each step, and "
            "packed_tokens bounds its memory"
        )
    logger.warning(f"{name} runs on packed rows without padding{lost}")


def _warn_of_hooks(models: Iterable[Any]) -> bool:
    """Warn if the LM head of a model has hooks, and return whether one has."""
    heads = [causal_model(model).get_output_embeddings() for model in models]  # type: ignore[operator]
    found = [type(head).__name__ for head in heads if has_own_hooks(head)]
    if found:
        warnings.warn(
            f"hooks on the LM head ({', '.join(dict.fromkeys(found))}) do not fire in this "
            "trainer's losses and log-probabilities, which are computed without logits; hooks on "
            "the model, its backbone and its layers do",
            stacklevel=6,  # the call of use_fastrl
        )
    return bool(found)


def _takes_fused_lm_head(module: nn.Module) -> bool:
    function = inspect.unwrap(module.forward, stop=lambda own: "fused_lm_head" in _names_in(own))
    return "fused_lm_head" in _names_in(function)


def _names_in(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_varnames


def with_globals(function: Any, **names: Any) -> Any:
    """Return a copy of a function or bound method that finds other values under global names."""
    own = getattr(function, "__func__", function)
    copy = FunctionType(
        own.__code__, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__
    )
    copy.__kwdefaults__ = own.__kwdefaults__
    return copy if own is function else MethodType(copy, function.__self__)
