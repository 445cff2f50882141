"""A model's logits from random last hidden states, and the output of its linear layer alone."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.integrations.transformers.hooks import runtime_hooks_only
from fastrl.integrations.transformers.linear import head_layers
from fastrl.integrations.transformers.wrappers import (
    LOGITS,
    backbone,
    decoder,
    forward_of,
    uncompiled,
)

#: The number of compared rows, and the largest of their logits, which a softcap of 30 halves.
_ROWS, _LARGEST = 4, 50.0


class RandomRows:
    """Random last hidden states of a causal language model.

    Attributes:
        rounding: the largest relative rounding of the logits, 2^-7 in bfloat16.
    """

    def __init__(self, causal: nn.Module, *, is_whole: bool, scales: set[float]) -> None:
        """Draw the rows.

        Args:
            causal: the causal language model.
            is_whole: whether one rank alone can call the model.
            scales: factors by which the model may multiply the hidden states before its head.
        """
        self.rounding = 0.0
        self._scales = scales
        self._scale = 1.0  # the factor that it uses
        self._factor = 1.0
        self._causal = causal
        # OPT calls the decoder of its base model, not the base model
        self._backbones = dict.fromkeys((decoder(causal), backbone(causal)))
        self._layers = head_layers(causal.get_output_embeddings())  # type: ignore[operator]
        self._states: Tensor | None = None
        self._linear: Tensor | None = None
        self._without_bias = 1.0  # the largest product of the rows and the weight
        self._is_whole = is_whole

    def logits(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the logits `[rows, V]` of the model and of its linear layer, in float64."""
        self._call(model)
        assert self._states is not None
        highest = torch.finfo(self._states.dtype).max / 16  # random numbers are below 8
        self._factor = min(_LARGEST / max(self._without_bias, 1e-9), highest)
        return self._call(model)

    @torch.no_grad()
    def _call(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        tokens = self._token_ids()
        self._states = self._linear = None
        own_linear = self._layers.linear.forward

        def watched(hidden: Tensor) -> Tensor:
            if self._states is not None:
                self._linear = self._product(self._states, hidden)
            return own_linear(hidden)

        with contextlib.ExitStack() as stack:
            for context in (
                evaluating(model),
                uncompiled(model),
                *map(runtime_hooks_only, model.modules()),
                forward_of(self._layers.linear, watched),
                *(forward_of(part, self._random_states(part)) for part in self._backbones),
            ):
                stack.enter_context(context)
            try:
                logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
            except (RuntimeError, IndexError) as error:
                given_rows = self._states is not None and self._linear is None
                if given_rows and not isinstance(error, torch.OutOfMemoryError):
                    raise self._no_logits_of_rows() from error
                raise
        if self._linear is None:
            raise self._no_logits_of_rows()
        self.rounding = max(torch.finfo(x.dtype).eps for x in (self._linear, logits))
        # a float64 model reads its scale and softcap as Python numbers, and fastrl as float32
        self.rounding = max(self.rounding, torch.finfo(torch.float32).eps)
        return logits[0].double(), self._linear[0].double() / self._scale

    def _no_logits_of_rows(self) -> ValueError:
        return ValueError(
            f"{type(self._causal).__name__} must compute its logits with its LM head from the last "
            "hidden states of its base_model, but calls the head on something else, or not at all; "
            + LOGITS
        )

    def _random_states(self, part: nn.Module) -> Callable[..., Any]:
        """Return the forward of a module, with random last hidden states in its result."""
        own = part.forward

        def forward(*arguments: Any, **inputs: Any) -> Any:
            # ranks that share parameters must call all layers, or they wait for each other later
            outputs = self._outputs() if self._is_whole else own(*arguments, **inputs)
            states = outputs.last_hidden_state
            generator = torch.Generator().manual_seed(0)
            random = torch.randn(states.shape, generator=generator, dtype=torch.float32)
            self._states = outputs.last_hidden_state = (random * self._factor).to(states)
            return outputs

        return forward

    def _outputs(self) -> Any:
        """Return the outputs of a backbone, in which all fields but the states are None."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        class Outputs(BaseModelOutputWithPast):
            def __getattr__(self, name: str) -> None:
                if name.startswith("_"):
                    raise AttributeError(name)

        weight = self._layers.linear.weight
        dtype: torch.dtype = self._causal.dtype  # type: ignore[assignment]
        return Outputs(last_hidden_state=weight.new_empty(1, _ROWS, weight.shape[1], dtype=dtype))

    def _product(self, states: Tensor, given: Tensor) -> Tensor:
        weight, bias, _ = self._layers.parameters()
        weight, bias = _whole(weight), None if bias is None else _whole(bias)
        self._scale = 1.0
        if bias is None:
            given = _whole(given)
            scale = next((x for x in self._scales if _is_multiple(given, x, states)), None)
            if scale is not None:  # `given` is rounded once more than the states
                states, self._scale = given, scale
        states = states.to(weight.dtype)
        logits = nn.functional.linear(states, weight, bias)
        largest = logits if bias is None else nn.functional.linear(states, weight)
        self._without_bias = largest.abs().nan_to_num().amax().item()
        if self._layers.lora is not None:
            a, b, scale = self._layers.lora
            logits = logits + scale * b(a(states.to(a.weight.dtype)))
        return logits

    def _token_ids(self) -> Tensor:
        """Return ids of ordinary tokens, not of image placeholders."""
        config = self._causal.config
        text = config.get_text_config()  # type: ignore[union-attr, operator]
        special = {
            value
            for part in (config, text)
            for name, value in vars(part).items()
            if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
        }
        weight = self._causal.get_input_embeddings().weight  # type: ignore[operator]
        ordinary = [i for i in range(min(text.vocab_size, 64)) if i not in special] or [0]
        tokens = itertools.islice(itertools.cycle(ordinary), _ROWS)
        return torch.tensor([list(tokens)], device=weight.device)


def _is_multiple(given: Tensor, scale: float, states: Tensor) -> bool:
    """Return whether a model has multiplied its hidden states by a factor before its head."""
    rounding = max(torch.finfo(x.dtype).eps for x in (given, states))
    given, expected = given.double(), scale * states.double()
    return bool(((given - expected).abs() <= rounding * expected.abs()).all()) and scale not in (
        0,
        1,
    )


def _whole(parameter: Tensor) -> Tensor:
    """Return a whole parameter that tensor parallelism has split over ranks."""
    gather = getattr(parameter, "full_tensor", None)
    return parameter if gather is None else gather()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode
