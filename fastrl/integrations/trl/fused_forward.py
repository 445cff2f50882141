"""A model whose forward answers TRL's `fused_lm_head=True` with fastrl.

TRL gives the causal language model of a trainer a forward that returns log-probabilities of the
labels instead of logits (`add_fused_lm_head`). Its place is taken here, so that whatever calls the
model, in whichever wrapper, is served.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from fastrl.backend import Backend
from fastrl.integrations.transformers import backbone
from fastrl.integrations.transformers.forward import inside_head
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


class FusedForward:
    """The forward of a causal language model, as TRL calls it with `fused_lm_head=True`.

    Attributes:
        calls: how many of them fastrl has answered.
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
        """Prepare the forward; `install` puts it in its place.

        Args:
            trainer: whose precision is used.
            model: its model, or its reference, in any wrapper.
            wanted: the outputs of `token_outputs` that TRL reads.
            compiled: the backbones of the trainer's models that are compiled.
            temperature: of the distribution.
            backend: as in `use_fastrl`.
        """
        self.calls = 0
        self._trainer = trainer
        self._causal = causal_model(model)
        self._score = functools.partial(
            token_outputs, trainer, wanted=tuple(wanted), temperature=temperature, backend=backend
        )
        self._compiled = compiled
        self._is_compiled = self._undone = False
        self._previous = self._causal.__dict__.get("forward")
        self._forward: Any = None

    def install(self) -> None:
        """Replace the forward of the causal language model."""
        own = self._causal.forward
        # of the class or of accelerate; bound again, so that a copy of the model calls its own
        function = getattr(own, "__func__", None)

        @functools.wraps(function or own)  # generate() reads the signature
        def forward(
            causal: nn.Module, *arguments: Any, fused_lm_head: bool = False, **inputs: Any
        ) -> Any:
            if fused_lm_head and not self._undone:
                return self._answer(causal, *arguments, **inputs)
            if fused_lm_head:
                inputs["fused_lm_head"] = True
            return (
                own(*arguments, **inputs)
                if function is None
                else function(causal, *arguments, **inputs)
            )

        self._forward = types.MethodType(forward, self._causal)
        self._causal.__dict__["forward"] = self._forward

    def undo(self) -> None:
        """Restore the forward; where a wrapper around it has been kept, it calls TRL's."""
        self._undone = True
        if self._forward is None or self._causal.__dict__.get("forward") is not self._forward:
            return
        if self._previous is None:
            del self._causal.__dict__["forward"]
        else:
            self._causal.__dict__["forward"] = self._previous

    @contextlib.contextmanager
    def ready(self, model: nn.Module) -> Iterator[None]:
        """Prepare calls of the model in its present wrappers, and let them run uncompiled.

        The first call, and one after the scale or the softcap have changed, compares a few rows.
        """
        prove(model)
        self._is_compiled = any(is_compiled(wrapper) for wrapper in wrappers(model))
        with uncompiled(model):
            yield

    def _answer(
        self,
        causal: nn.Module,
        *arguments: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        **inputs: Any,
    ) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        self.calls += 1
        with only_thread_in(causal):
            with replaced_autocast(self._trainer, causal):
                states, aux_loss = states_of(
                    causal, self._run_backbone(causal), *arguments, **inputs
                )
            if shift_labels is not None:
                token_ids = shift_labels
            elif labels is not None:
                token_ids, states = labels[:, 1:], states[:, :-1]
            else:
                raise TypeError("fused_lm_head=True needs labels or shift_labels, got neither")
            found = inside_head(causal, self._score(token_ids), states)
        mask = token_ids != -100
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = -found["log_probs"].sum() / count
        if aux_loss is not None:
            config = causal.config.get_text_config()  # type: ignore[union-attr, operator]
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **found)

    def _run_backbone(self, causal: nn.Module) -> Any:
        own = backbone(causal)
        return functools.partial(self._compiled.run, own) if self._is_compiled else own


def replaced_autocast(trainer: Any, causal: nn.Module) -> AbstractContextManager[Any]:
    """Return the autocast that accelerate has put around the forward which is not called now."""
    if "_original_forward" not in causal.__dict__:
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = trainer.accelerator.autocast()
    return context
