"""A causal language model inside its wrappers: torch.compile, DDP, FSDP, DeepSpeed, PEFT."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

#: The alternative for a model that the linear functions cannot take.
LOGITS = "`fastrl.logits_policy_loss` and `fastrl.token_logprobs` take the logits of any model"

_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def only_thread_in(causal: nn.Module) -> threading.RLock:
    """Return the lock of a model, in which one thread at a time gives it another forward."""
    return _LOCKS.setdefault(causal, threading.RLock())


def backbone(model: nn.Module) -> nn.Module:
    """Return the module that computes the last hidden states of a causal language model.

    In a vision-language model it is the module that also takes the images.

    Args:
        model: a `transformers` causal language model, or a wrapper around one.

    Returns:
        The module.

    Raises:
        ValueError: the model is not a causal language model.

    Examples:
        >>> import transformers
        >>> from fastrl.integrations.transformers import backbone
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> config = transformers.LlamaConfig(vocab_size=32, num_attention_heads=1, **sizes)
        >>> type(backbone(transformers.AutoModelForCausalLM.from_config(config))).__name__
        'LlamaModel'
    """
    causal = causal_model(model)
    base: nn.Module = causal.base_model  # type: ignore[assignment]
    return decoder(causal) if base is causal else base


def decoder(causal: nn.Module) -> nn.Module:
    """Return the text model in a causal language model."""
    found: nn.Module = causal.get_decoder()  # type: ignore[operator]
    # Llama4ForCausalLM has the prefix of the multimodal class, and finds only itself
    return causal.model if found is causal else found  # type: ignore[return-value]


def causal_model(model: nn.Module) -> nn.Module:
    """Return the causal language model inside its wrappers.

    Raises:
        ValueError: the model is not a causal language model.
    """
    *_, causal = wrappers(model)
    if not hasattr(causal, "get_output_embeddings") or not hasattr(causal, "config"):
        raise ValueError(
            f"model must be a causal language model of transformers, got {type(causal).__name__}"
        )
    if getattr(causal.config, "is_encoder_decoder", False):
        raise ValueError(
            f"model must be a causal language model, got the encoder and decoder "
            f"{type(causal).__name__}: fastrl would need the states of its decoder; "
            f"{LOGITS}"
        )
    return causal


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model and the models that it wraps, down to the causal language model."""
    while True:
        yield model
        # these pass on attributes of the wrapped model, so they come before PEFT
        inner = unwrapped_once(model)
        if inner is not None:
            model = inner
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            yield model.base_model  # type: ignore[misc]
            model = model.get_base_model()  # type: ignore[operator]
        else:
            return


def unwrapped_once(model: nn.Module) -> nn.Module | None:
    """Return the module that torch.compile, DDP, FSDP1 or DeepSpeed has wrapped, or None."""
    if is_compiled(model):
        return _what_is_compiled(model)
    if _is_parallel(model):
        return model.module  # type: ignore[return-value]
    return None


def _is_parallel(model: nn.Module) -> bool:
    """Return whether a module is the wrapper of DDP, FSDP1 or DeepSpeed."""
    return is_fsdp1(model) or bool(_names(model) & {"DistributedDataParallel", "DeepSpeedEngine"})


def reduces_gradients(model: nn.Module) -> bool:
    """Return whether a module is a wrapper without whose forward gradients stay on their rank.

    FSDP2 wraps nothing: its hooks are on the modules themselves. DeepSpeed's `engine.backward`
    reduces gradients after any forward.
    """
    is_ddp = "DistributedDataParallel" in _names(model)
    if not ((is_ddp or is_fsdp1(model)) and dist.is_available() and dist.is_initialized()):
        return False
    group = None if is_fsdp1(model) else getattr(model, "process_group", None)
    return dist.get_world_size(group) > 1


def _what_is_compiled(model: nn.Module) -> nn.Module:
    """Return the module that was passed to `torch.compile`, for example DDP's wrapper.

    It is not always `_orig_mod`, in which accelerate's `unwrap_model` puts the module inside DDP.
    """
    call = getattr(model, "_torchdynamo_orig_callable", None)  # its forward
    owner = getattr(call, "__self__", None)
    return owner if isinstance(owner, nn.Module) else model._orig_mod  # type: ignore[return-value]


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module is the result of `torch.compile`."""
    return "OptimizedModule" in _names(model)


def is_fsdp1(model: nn.Module) -> bool:
    """Return whether a module is FSDP1's wrapper around one."""
    return "FullyShardedDataParallel" in _names(model)


def _names(model: nn.Module) -> set[str]:
    """Return the names of a module's types, because DeepSpeed cannot be imported everywhere."""
    return {kind.__name__ for kind in type(model).__mro__}


@contextlib.contextmanager
def calling_inner_models(model: nn.Module) -> Iterator[None]:
    """Let wrappers that keep the forward of an inner model look it up when they are called.

    PEFT's `disable_adapter()` gives a wrapper with prompt learning the forward of its model.
    """
    chain = list(wrappers(model))
    with contextlib.ExitStack() as stack:
        for place, wrapper in enumerate(chain):
            kept = wrapper.__dict__.get("forward")
            for inner in chain[place + 1 :]:
                if getattr(kept, "__self__", None) is inner:
                    stack.enter_context(forward_of(wrapper, _forward_when_called(inner)))
        yield


def _forward_when_called(module: nn.Module) -> Callable[..., Any]:
    return lambda *arguments, **inputs: module.forward(*arguments, **inputs)


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Let a model run without the `torch.compile` around it or inside it; hooks fire."""
    with contextlib.ExitStack() as stack:
        for wrapper in wrappers(model):
            if is_compiled(wrapper):
                stack.enter_context(forward_of(wrapper, _what_is_compiled(wrapper)))
        yield


@contextlib.contextmanager
def forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a module another forward in this thread; its hooks fire as usual."""
    previous, own = module.__dict__.get("forward"), module.forward
    thread = threading.get_ident()

    def of_thread(*arguments: Any, **inputs: Any) -> Any:
        here = threading.get_ident() == thread
        return forward(*arguments, **inputs) if here else own(*arguments, **inputs)

    module.__dict__["forward"] = of_thread
    try:
        yield
    finally:
        if previous is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = previous
