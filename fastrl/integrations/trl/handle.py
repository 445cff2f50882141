"""A handle with an undo, and checks of models, for all adapters of TRL's trainers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastrl.backend import Backend
from fastrl.integrations.support import Support
from fastrl.integrations.transformers import lm_head
from fastrl.integrations.transformers.hooks import has_own_hooks
from fastrl.integrations.transformers.wrappers import causal_model
from fastrl.integrations.trl.rules import REFUSED
from fastrl.integrations.undoing import Undoable
from fastrl.ops.linear_token_stats import linear_token_stats


class Choices(NamedTuple):
    """The arguments of `use_fastrl`."""

    fused: bool | None
    replay_kept_tokens: bool
    backend: Backend


class Handle(Undoable):
    """A trainer that runs on fastrl until `undo()` or the end of a `with` block.

    Attributes:
        fused: whether fastrl computes loss and gradient in one pass.
        reason: why it does not do so, or None.
        undone: whether `undo` has been called. If a replaced method was wrapped since then, `undo`
            does not find it, so the method checks this and calls the previous method.

    Examples:
        >>> from fastrl.integrations.trl import use_fastrl
        >>> with use_fastrl(trainer) as handle:  # doctest: +SKIP
        ...     trainer.train()
    """

    def __init__(self, reason: str | None = None) -> None:
        """Change nothing yet."""
        self.fused = reason is None
        self.reason = reason
        self.undone = False
        self._warned_of_hooks = False
        self._replaced: list[tuple[Any, str, Any, tuple[Any, ...]]] = []

    def replace(self, owner: Any, name: str, function: Any) -> None:
        """Set an attribute of an instance until `undo`."""
        previous = (owner.__dict__[name],) if name in owner.__dict__ else ()
        self._replaced.append((owner, name, function, previous))
        owner.__dict__[name] = function

    def warn_of_hooks(self, *models: Any) -> None:
        """Warn once; called at every step, as callbacks may add hooks when training begins."""
        if not self._warned_of_hooks:
            self._warned_of_hooks = warn_of_hooks(models)

    def undo(self) -> None:
        """Restore the trainer's methods; a second call does nothing.

        Methods that have been patched since then are kept, and call TRL's.
        """
        self.undone = True
        while self._replaced:
            owner, name, function, previous = self._replaced.pop()
            if owner.__dict__.get(name) is not function:
                continue
            if previous:
                owner.__dict__[name] = previous[0]
            else:
                del owner.__dict__[name]


class LossHandle(Handle):
    """A trainer whose `compute_loss` is replaced, except in calls that ask for the outputs."""

    def __init__(self, trainer: Any, reason: str | None, backend: Backend) -> None:
        """Replace the method of the instance."""
        super().__init__(reason)
        self._trainer = trainer
        self._backend = backend
        own = trainer.compute_loss

        @functools.wraps(own)
        def loss(
            model: nn.Module,
            inputs: dict[str, Any],
            return_outputs: bool = False,
            num_items_in_batch: Tensor | int | None = None,
        ) -> Any:
            if self.undone or return_outputs:
                return own(model, inputs, return_outputs, num_items_in_batch)
            self._warn_of_hooks()
            return self.compute_loss(model, inputs, num_items_in_batch)

        self.replace(trainer, "compute_loss", loss)
        self._warn_of_hooks()

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], count: Tensor | int | None
    ) -> Tensor:
        """Return the loss of a batch; `count` is TRL's `num_items_in_batch`."""
        raise NotImplementedError

    def _warn_of_hooks(self) -> None:
        self.warn_of_hooks(self._trainer.model, self._trainer.teacher_model)


def check_models(
    trainer: Any,
    backend: Backend,
    names: tuple[str, ...] = ("model", "ref_model"),
    rules: tuple[Support, ...] = (),
) -> None:
    """Refuse models whose head fastrl cannot read, and a backend that cannot run.

    Args:
        trainer: the trainer that has the models.
        backend: the backend that the user asked for.
        names: attributes of the trainer; missing ones and None are left out.
        rules: the rules that refuse trainers of this kind.

    Raises:
        ValueError: a rule refuses the trainer or one of its models.
    """
    for rule in (*REFUSED, *rules):
        if rule.applies is not None and rule.applies(trainer):
            raise ValueError(f"use_fastrl does not support {rule.option}: {rule.note}")
    for name in names:
        if getattr(trainer, name, None) is not None:
            lm_head(getattr(trainer, name))
    one = torch.zeros(1, 1, dtype=torch.float32, device=trainer.accelerator.device)
    linear_token_stats(one, one, one[0].long(), backend=backend)  # raises if it cannot run


def warn_of_hooks(models: Iterable[Any]) -> bool:
    """Warn if the LM head of a model has hooks, and return whether one has; skip None."""
    heads = [causal_model(m).get_output_embeddings() for m in models if m is not None]  # type: ignore[operator]
    found = [type(head).__name__ for head in heads if has_own_hooks(head)]
    if found:
        warnings.warn(
            f"hooks on the LM head ({', '.join(dict.fromkeys(found))}) do not fire in this "
            "trainer's losses and log-probabilities, which are computed without logits; hooks on "
            "the model, its backbone and its layers do",
            stacklevel=8,  # the call of use_fastrl
        )
    return bool(found)


def refuse_unfused(choices: Choices, base: type) -> None:
    """Refuse `fused=False` for a trainer whose loss can only be replaced as a whole."""
    if choices.fused is False:
        raise ValueError(
            f"fused must be None or True for a {base.__name__}: its loss is a divergence, without "
            "log-probabilities of tokens to replace"
        )


def with_globals(function: Any, **names: Any) -> Any:
    """Return a copy of a function or bound method that finds other values under global names."""
    own = getattr(function, "__func__", function)
    copy = FunctionType(
        own.__code__, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__
    )
    copy.__kwdefaults__ = own.__kwdefaults__
    return copy if own is function else MethodType(copy, function.__self__)
