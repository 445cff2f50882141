"""Calls inside the forward of a model and of its LM head.

DDP, FSDP and DeepSpeed gather parameters, and prepare the reduction of gradients, in the forward of
the modules that they wrap. So the wrappers are called as usual, and only the forward of the module
inside them is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fastrl.integrations.transformers.head import LmHead, lm_head
from fastrl.integrations.transformers.hooks import runtime_hooks_only
from fastrl.integrations.transformers.linear import head_layers
from fastrl.integrations.transformers.transform import prove
from fastrl.integrations.transformers.wrappers import (
    backbone,
    calling_inner_models,
    causal_model,
    forward_of,
    only_thread_in,
    reduces_gradients,
    uncompiled,
    unwrapped_once,
    wrappers,
)

Result = TypeVar("Result")


def last_hidden_states(model: nn.Module, **inputs: Any) -> Tensor:
    """Return the backbone's last hidden states, the input of the LM head.

    Only the backbone is called, not the causal language model or a wrapper around it. Hooks
    (`register_forward_hook`, ...) on the causal language model or a wrapper do not fire; hooks on
    the backbone and its layers do.

    Args:
        model: a `transformers` causal language model, or a wrapper around one (PEFT, DDP, ...).
        **inputs: the model's own keyword arguments: `input_ids`, `attention_mask`, `position_ids`,
            ...

    Returns:
        Hidden states `[B, T, H]` in the dtype of the model.

    Raises:
        ValueError: a PEFT wrapper has an adapter that only its own forward applies; gradients are
            enabled, and the forward of DDP or FSDP1, which is not called, would reduce
            them over several ranks; or the autocast of accelerate would be lost.

    Examples:
        >>> import torch, transformers
        >>> from fastrl.integrations.transformers import last_hidden_states
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> config = transformers.LlamaConfig(vocab_size=32, num_attention_heads=1, **sizes)
        >>> model = transformers.AutoModelForCausalLM.from_config(config)
        >>> last_hidden_states(model, input_ids=torch.tensor([[3, 4, 5]])).shape
        torch.Size([1, 3, 8])
    """
    _refuse_adapters_of_rows(inputs)
    for wrapper in wrappers(model):
        _refuse_adapters_of_the_wrapper(wrapper)
        _refuse_unreduced_gradients(wrapper)
        _refuse_lost_autocast("last_hidden_states", wrapper)
    states: Tensor = backbone(model)(**inputs, use_cache=False).last_hidden_state
    return states


def inside_forward(
    model: nn.Module, function: Callable[[Tensor, LmHead], Result], /, **inputs: Any
) -> Result:
    """Return `function(hidden, head)`, called in the forward of the model and of its LM head.

    DDP reduces gradients only there, and only there the parameters of the head are whole under
    FSDP1, FSDP2 and ZeRO-3. All ranks must make the call together, as with any forward. The result
    of `function` passes through the forward of the wrappers and their hooks, so tensors that need a
    gradient must be the result itself or inside a tuple, list or dict. `function` must not call the
    model. A prompt-learning adapter (PEFT) puts its virtual tokens before the others.

    With accelerate's mixed precision, make the call in `accelerator.autocast()`.

    Args:
        model: a `transformers` causal language model, as its wrappers returned it.
        function: a function of the last hidden states `[B, T, H]` and the `LmHead`.
        **inputs: the model's own keyword arguments: `input_ids`, `attention_mask`, ...

    Returns:
        The result of `function`.

    Raises:
        TypeError: `function` is not callable.
        ValueError: `lm_head` does not support the head, the autocast of accelerate would be lost,
            or `adapter_names` chooses an adapter for each row.
        RuntimeError: `function` calls the model.

    Examples:
        >>> import fastrl, torch, transformers
        >>> from fastrl.integrations.transformers import inside_forward
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> config = transformers.LlamaConfig(vocab_size=32, num_attention_heads=1, **sizes)
        >>> model = transformers.AutoModelForCausalLM.from_config(config)
        >>> ids = torch.tensor([[3, 4, 5]])
        >>> def logprobs(hidden, head):
        ...     return fastrl.linear_token_logprobs(
        ...         hidden[:, :-1], token_ids=ids[:, 1:], **head.arguments()
        ...     )
        >>> inside_forward(model, logprobs, input_ids=ids).shape
        torch.Size([1, 2])
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    _refuse_adapters_of_rows(inputs)
    prove(model)
    causal = causal_model(model)
    _refuse_lost_autocast("inside_forward", causal)

    def forward(*arguments: Any, **inputs: Any) -> Result:
        states = backbone(causal)(*arguments, **inputs).last_hidden_state
        return inside_head(causal, function, states)

    inputs = {**inputs, "use_cache": False}
    inputs.pop("return_dict", None)
    return call_with_forward(model, forward, **inputs)


def call_with_forward(model: nn.Module, forward: Callable[..., Result], **inputs: Any) -> Result:
    """Call a model with another forward in the causal language model inside its wrappers.

    A `torch.compile` around the model is bypassed.
    """
    results: list[Result] = []

    def remembered(*arguments: Any, **inputs: Any) -> Result:
        with _once("the model"):
            results.append(forward(*arguments, **inputs))
        return results[-1]

    _once = _Once()
    with calling(model, remembered):
        returned: Result = model(**inputs)
    if not results:
        raise ValueError(
            f"{type(model).__name__} must call the forward of the "
            f"{type(causal_model(model)).__name__} in it, but has kept or replaced that forward"
        )
    return in_own_dtypes(returned, results[-1])


@contextlib.contextmanager
def calling(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give the causal language model in a model's wrappers another forward, in this thread.

    A `torch.compile` around the model is bypassed.
    """
    causal = causal_model(model)
    with contextlib.ExitStack() as stack:
        for context in (
            only_thread_in(causal),
            uncompiled(model),
            calling_inner_models(model),
            forward_of(causal, forward),
        ):
            stack.enter_context(context)
        yield


def inside_head(
    causal: nn.Module, function: Callable[[Tensor, LmHead], Result], hidden: Tensor
) -> Result:
    """Return `function(hidden, head)`, called in the forward of the LM head of a causal model.

    The user's hooks on the head do not fire: they expect logits.
    """
    results: list[Result] = []

    def compute(hidden: Tensor) -> Result:
        with _once("the LM head"):
            results.append(_without_views(function(hidden, lm_head(causal))))
        return results[-1]

    _once = _Once()

    layers = head_layers(causal.get_output_embeddings()).called()  # type: ignore[operator]
    with contextlib.ExitStack() as stack:
        following: list[Callable[[Tensor], Any]] = [*layers[1:], compute]
        for layer, then in zip(layers, following, strict=True):
            # FSDP1 gathers parameters in the forward of its wrapper, which calls the next layer
            if unwrapped_once(layer) is None:
                stack.enter_context(runtime_hooks_only(layer))
                stack.enter_context(forward_of(layer, then))
        returned: Result = layers[0](hidden)
    return in_own_dtypes(returned, results[-1])


class _Once:
    """A guard that raises if a forward is called while it runs, which would recurse forever."""

    def __init__(self) -> None:
        self._runs = False

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._runs:
            raise RuntimeError(
                f"{name} must not be called in the function that is called inside its forward; "
                "call it before, or after"
            )
        self._runs = True
        try:
            yield
        finally:
            self._runs = False


def _without_views(results: Result) -> Result:
    """Copy tensors that are views: FSDP2 puts its hooks on tensors, and warns of views."""

    def copied(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) and x.requires_grad and x._is_view() else x

    return tree_map(copied, results)  # type: ignore[no-any-return]


def in_own_dtypes(returned: Result, computed: Result) -> Result:
    """Return the results of a forward in the dtypes in which they were computed.

    A mixed-precision policy of FSDP2 rounds all outputs, for example to bfloat16, even a loss.
    """
    new, structure = tree_flatten(returned)
    old, _ = tree_flatten(computed)
    result: Result = tree_unflatten(
        [
            b if isinstance(b, Tensor) and a.dtype != b.dtype else a
            for a, b in zip(new, old, strict=True)
        ],
        structure,
    )
    return result


def _refuse_adapters_of_rows(inputs: dict[str, Any]) -> None:
    if inputs.get("adapter_names") is not None:
        raise ValueError(
            "adapter_names must not be given: the LM head would have to use the adapter of each row"
        )


def _refuse_lost_autocast(function: str, model: nn.Module) -> None:
    """Refuse a model whose forward accelerate has replaced by one under autocast."""
    if "_original_forward" not in model.__dict__:
        return
    if not torch.is_autocast_enabled(next(model.parameters()).device.type):
        raise ValueError(
            f"{function} must be called in `with accelerator.autocast():` for a model that "
            "accelerate has prepared with mixed precision"
        )


def _refuse_unreduced_gradients(model: nn.Module) -> None:
    """Refuse a wrapper whose forward, which is not called, prepares the reduction of gradients."""
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    if trained and reduces_gradients(model):
        raise ValueError(
            f"model must not be a {type(model).__name__} over several ranks while gradients are "
            "enabled: each rank would keep its own gradients, since only the forward of the "
            "wrapper reduces them; `inside_forward` calls it"
        )


def _refuse_adapters_of_the_wrapper(model: nn.Module) -> None:
    config = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            "model must not use a prompt-learning adapter: the wrapper, not the backbone, adds its "
            "virtual tokens; `inside_forward` calls the wrapper"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise ValueError(
            "model must not use an activated LoRA (alora_invocation_tokens): the wrapper, not the "
            "backbone, tells the layers where it begins; `inside_forward` calls the wrapper"
        )
