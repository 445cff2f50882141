"""The models of a trainer, which answer TRL's `fused_lm_head=True` with fastrl.

TRL calls its models with `fused_lm_head=True` and reads log-probabilities from their output, which
the forward computes without logits. While a method of the trainer runs, the forward of the causal
language model is fastrl's, and its backbone may run compiled, packed, or both. The wrappers
(DDP, FSDP, DeepSpeed, PEFT) are called as usual.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.integrations.transformers import LmHead, backbone
from fastrl.integrations.transformers.forward import calling, in_own_dtypes, inside_head
from fastrl.integrations.transformers.transform import prove
from fastrl.integrations.transformers.wrappers import (
    causal_model,
    forward_of,
    is_compiled,
    wrappers,
)
from fastrl.integrations.trl.packed_backbones import PackedBackbones
from fastrl.integrations.trl.token_outputs import is_head_float32

#: Tokens `[B, T]` that the positions predict, -100 where none -> (their hidden states `[B, T, H]`,
#: head) -> fields of the output, in which `loss` is the mean of `-log_probs`.
Score = Callable[[Tensor], Callable[[Tensor, LmHead], dict[str, Tensor]]]

#: Inputs of a model whose second dimension is over tokens.
_SEQUENCES = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


class FusedModels:
    """The models of a trainer, while methods of the trainer run on fastrl.

    Attributes:
        packing: which of their backbones run on rows without padding.
        counts_positions: whether positions on padded batches begin at a sequence's first token, as
            in `generate`; TRL leaves them to the model, which may begin at the padding.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        packed: bool | None,
        tokens: int | None = None,
        reason: str | None = None,
    ) -> None:
        """Change nothing yet.

        Args:
            trainer: the trainer.
            packed: True requires packed rows, None tries them, and False leaves padded batches.
            tokens: the most tokens of a packed row, or None.
            reason: why this trainer's models cannot be packed, or None.

        Raises:
            ValueError: `packed` is True, and the models cannot be packed.
        """
        self.counts_positions = False
        self._trainer = trainer
        self.packing = PackedBackbones(trainer, packed=packed, tokens=tokens, reason=reason)
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}
        self._running: set[nn.Module] = set()

    @contextlib.contextmanager
    def running(self, *models: nn.Module) -> Iterator[None]:
        """Let the backbones of models run compiled, where accelerate compiles them, and packed.

        Only backbones are compiled: the rest of a forward consists of fastrl's operators.
        """
        with contextlib.ExitStack() as stack:
            for model in models:
                part = backbone(model)
                if part in self._running:  # one replaced method calls another
                    continue
                self._running.add(part)
                stack.callback(self._running.discard, part)
                run = own = part.forward
                if any(is_compiled(wrapper) for wrapper in wrappers(model)):
                    run = self._compiled_forward(part)
                run = self.packing.forward(part, run, own)
                if run is not own:
                    stack.enter_context(forward_of(part, run))
            yield

    @contextlib.contextmanager
    def answering(self, model: nn.Module, score: Score) -> Iterator[list[Any]]:
        """Answer calls of a model with `fused_lm_head=True`; yield the list of the outputs.

        The first call for a model, and any call after scale or softcap have changed, compares a
        few rows with its own logits.
        """
        prove(model)
        causal, outputs = causal_model(model), list[Any]()
        own = causal.forward

        def forward(*arguments: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
            if not fused_lm_head:
                return own(*arguments, **inputs)
            outputs.append(self._answer(causal, score, *arguments, **inputs))
            return outputs[-1]

        def unrounded(_: nn.Module, __: Any, returned: Any) -> Any:
            """Undo the rounding of outputs by FSDP2, whose hook comes before this one."""
            answered = outputs and type(returned) is type(outputs[-1])
            return in_own_dtypes(returned, outputs[-1]) if answered else returned

        hook = model.register_forward_hook(unrounded)
        try:
            with calling(model, forward):
                yield outputs
        finally:
            hook.remove()

    def call(self, model: nn.Module, score: Score, **inputs: Any) -> Any:
        """Return the `FusedCausalLMOutput` of a model that has no `fused_lm_head` of TRL's."""
        with self.answering(model, score):
            return model(**inputs, fused_lm_head=True)

    def _answer(
        self,
        causal: nn.Module,
        score: Score,
        *arguments: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        **inputs: Any,
    ) -> Any:
        """Return what TRL's forward returns: `labels[:, 1:]` are predicted, or `shift_labels`."""
        if shift_labels is not None:
            token_ids = shift_labels
        elif labels is not None:
            token_ids = labels[:, 1:]
        else:
            raise TypeError("fused_lm_head=True needs labels or shift_labels, got neither")
        with self._replaced_autocast(causal), self.packing.reading(token_ids, inputs):
            if self.packing.counts_positions(backbone(causal), always=self.counts_positions):
                inputs = _with_positions(causal, inputs)
            states, aux_loss = _states(causal, *arguments, **inputs)
        if shift_labels is None:
            states = states[:, :-1]
        if is_head_float32(self._trainer):
            states = states.float()
        found = inside_head(causal, score(token_ids), states)
        mask = token_ids != -100
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        found["loss"] = -found["log_probs"].sum() / count
        if aux_loss is not None:
            config = causal.config.get_text_config()  # type: ignore[union-attr, operator]
            found["loss"] += getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        return _output_type()(label_mask=mask, aux_loss=aux_loss, **found)

    def _replaced_autocast(self, causal: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast that accelerate has put around the replaced forward."""
        if "_original_forward" not in causal.__dict__:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self._trainer.accelerator.autocast()
        return context

    def _compiled_forward(self, part: nn.Module) -> Callable[..., Any]:
        """Return a backbone's forward, compiled with the trainer's options for any length."""
        options = self._trainer.accelerator.state.dynamo_plugin.to_kwargs()
        if part not in self._compiled:
            self._compiled[part] = torch.compile(part.forward, **options)

        def run(*arguments: Any, **inputs: Any) -> Any:
            if options.get("dynamic") is not False:
                # a new length would compile a second time, and completions seldom have equal ones
                for name in _SEQUENCES:
                    if inputs.get(name) is not None:
                        torch._dynamo.maybe_mark_dynamic(inputs[name], 1)
            return self._compiled[part](*arguments, **inputs)

        return run


@functools.cache
def _output_type() -> Any:
    from trl.trainer.utils import FusedCausalLMOutput

    @dataclass
    class Output(FusedCausalLMOutput):  # type: ignore[misc]
        """TRL's output with a loss that wrappers do not change: AdaLoRA's adds to `loss`."""

        policy_loss: Tensor | None = None
        centering: Tensor | None = None

    return Output


def _with_positions(causal: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a model with positions, if it takes them and has no images."""
    mask = inputs.get("attention_mask")
    tensors = {name for name, value in inputs.items() if isinstance(value, Tensor)}
    if mask is None or mask.ndim != 2 or tensors - {"input_ids", "attention_mask"}:
        return inputs
    if "position_ids" not in inspect.signature(type(causal).forward).parameters:
        return inputs
    return {**inputs, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def _states(causal: nn.Module, *arguments: Any, **inputs: Any) -> tuple[Tensor, Tensor | None]:
    """Return the last hidden states, and the load-balancing loss of experts if requested."""
    config = causal.config.get_text_config()  # type: ignore[union-attr, operator]
    if getattr(config, "output_router_logits", False):
        inputs.setdefault("output_router_logits", True)
    outputs = backbone(causal)(*arguments, **{**inputs, "use_cache": False})
    if not inputs.get("output_router_logits"):
        return outputs.last_hidden_state, None
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(config, "num_experts", None) or config.num_local_experts
    found = load_balancing_loss_func(
        outputs.router_logits, experts, config.num_experts_per_tok, inputs.get("attention_mask")
    )
    return outputs.last_hidden_state, torch.as_tensor(found)
