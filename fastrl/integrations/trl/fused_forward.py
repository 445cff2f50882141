"""A model whose forward answers TRL's `fused_lm_head=True` with fastrl.

TRL gives the causal language model of a trainer a forward that returns log-probabilities of the
labels instead of logits (`add_fused_lm_head`). fastrl replaces this forward, and so serves every
caller of the model, in any wrapper.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from fastrl.backend import Backend
from fastrl.integrations.transformers import LmHead
from fastrl.integrations.transformers.forward import in_own_dtypes, inside_head
from fastrl.integrations.transformers.transform import prove
from fastrl.integrations.transformers.wrappers import (
    causal_model,
    is_compiled,
    only_thread_in,
    uncompiled,
    wrappers,
)
from fastrl.integrations.trl.scoring import CompiledBackbones, states_of
from fastrl.integrations.trl.token_outputs import token_outputs

#: Name of the `FusedForward` among the attributes of its forward, and of wrappers around that.
_MARK = "_fastrl"


class FusedForward:
    """The forward of a causal language model, as TRL calls it with `fused_lm_head=True`.

    Attributes:
        causal: the causal language model.
        forward: the new value of its attribute `forward`.
        undone: whether all calls go to TRL's forward, even from wrappers that have kept this one.
        calls: the number of calls that fastrl has answered.
    """

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        wanted: Sequence[str],
        compiled: CompiledBackbones,
        *,
        temperature: float = 1.0,
        backend: Backend = "auto",
    ) -> None:
        """Make the forward, without changing the model.

        Args:
            trainer: the trainer, whose precision is used.
            model: its model or reference model, in any wrapper.
            wanted: the outputs of `token_outputs` that TRL reads.
            compiled: the compiled backbones of the trainer's models.
            temperature: divides the logits.
            backend: `auto`, or the backend for the chunks.

        Raises:
            ValueError: the model has no forward with `fused_lm_head`, or already has fastrl's.
        """
        self.undone = False
        self.calls = 0
        self.causal = causal_model(model)
        self._trainer = trainer
        self._score = functools.partial(
            token_outputs, trainer, wanted=tuple(wanted), temperature=temperature, backend=backend
        )
        self._compiled = compiled
        self._is_compiled = False
        self._answered: Any = None  # the result of the model's forward, before its wrappers
        _refuse_other_forwards(self.causal)
        self.forward = self._around(self.causal.forward)

    def _around(self, own: Any) -> types.MethodType:
        # bound once more, so that a deep copy of the model calls TRL's forward on the copy
        function = getattr(
            own, "__func__", lambda _, *arguments, **inputs: own(*arguments, **inputs)
        )

        @functools.wraps(function)  # generate() reads the signature
        def forward(
            causal: nn.Module, *arguments: Any, fused_lm_head: bool = False, **inputs: Any
        ) -> Any:
            if fused_lm_head and not self.undone and causal is self.causal:
                return self._answer(*arguments, **inputs)
            if fused_lm_head:
                inputs["fused_lm_head"] = True
            return function(causal, *arguments, **inputs)

        forward.__dict__[_MARK] = self
        return types.MethodType(forward, self.causal)

    @contextlib.contextmanager
    def ready(self, model: nn.Module) -> Iterator[None]:
        """Prepare calls of the model in its current wrappers, and let them run uncompiled.

        The first call, and any call after scale or softcap have changed, compares a few rows.
        """
        prove(model)
        self._is_compiled = any(is_compiled(wrapper) for wrapper in wrappers(model))
        hook = model.register_forward_hook(self._unrounded)
        try:
            with uncompiled(model):
                yield
        finally:
            hook.remove()
            self._answered = None

    def _unrounded(self, _: nn.Module, arguments: Any, returned: Any) -> Any:
        """Undo the rounding of outputs by FSDP2, whose hook comes before this one."""
        answered, self._answered = self._answered, None
        return (
            returned if type(returned) is not type(answered) else in_own_dtypes(returned, answered)
        )

    def _answer(self, *arguments: Any, **inputs: Any) -> Any:
        self.calls += 1
        run = self._compiled.backbone(self.causal, compiled=self._is_compiled)
        self._answered = answer(self._trainer, self.causal, run, self._score, *arguments, **inputs)
        return self._answered


def answer(
    trainer: Any,
    causal: nn.Module,
    run: Callable[..., Any],
    score: Callable[[Tensor], Callable[[Tensor, LmHead], dict[str, Tensor]]],
    *arguments: Any,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    **inputs: Any,
) -> Any:
    """Return the `FusedCausalLMOutput` of a batch, in the forward of the causal language model.

    Args:
        trainer: the trainer, whose precision is used.
        causal: the causal language model.
        run: its backbone, or a function that calls it.
        score: `token_outputs` of given tokens.
        *arguments: arguments of the backbone.
        labels: `[B, T]`; each position predicts the label of the next position, and -100 is left
            out.
        shift_labels: `[B, T]`, the label that each position predicts.
        num_items_in_batch: the divisor of the loss; None means the number of labels.
        **inputs: keyword arguments of the backbone.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    with only_thread_in(causal):
        with _replaced_autocast(trainer, causal):
            states, aux_loss = states_of(causal, run, *arguments, **inputs)
        if shift_labels is not None:
            token_ids = shift_labels
        elif labels is not None:
            token_ids, states = labels[:, 1:], states[:, :-1]
        else:
            raise TypeError("fused_lm_head=True needs labels or shift_labels, got neither")
        found = inside_head(causal, score(token_ids), states)
    mask = token_ids != -100
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = -found["log_probs"].sum() / count
    if aux_loss is not None:
        config = causal.config.get_text_config()  # type: ignore[union-attr, operator]
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **found)


def _replaced_autocast(trainer: Any, causal: nn.Module) -> AbstractContextManager[Any]:
    """Return the autocast that accelerate has put around the bypassed forward."""
    if "_original_forward" not in causal.__dict__:
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = trainer.accelerator.autocast()
    return context


def _refuse_other_forwards(causal: nn.Module) -> None:
    own = inspect.unwrap(causal.forward, stop=_takes_fused_lm_head)
    mark = getattr(own, _MARK, None)
    if mark is not None and not mark.undone:
        raise ValueError(
            f"the forward of this {type(causal).__name__} is already replaced; undo that first"
        )
    if not _takes_fused_lm_head(own):
        raise ValueError(
            f"the forward of this {type(causal).__name__} has no `fused_lm_head`, which use_fastrl "
            "answers: this version of TRL computes logits, or has given that forward to a wrapper "
            "around the model (pass the model without `torch.compile`)"
        )


def _takes_fused_lm_head(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and "fused_lm_head" in code.co_varnames
