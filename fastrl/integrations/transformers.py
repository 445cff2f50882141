"""The LM head of a `transformers` causal language model, as the linear functions take it.

head = lm_head(model)
hidden = last_hidden_states(model, input_ids=..., attention_mask=...)
fastrl.linear_token_logprobs(hidden[:, :-1], token_ids=input_ids[:, 1:], **head.arguments())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastrl.ops.linear_token_stats import Lora


class LmHead(NamedTuple):
    """An LM head: logits = softcap(logit_scale * (hidden weight^T + bias)).

    Attributes:
        weight: `[V, H]`.
        bias: `[V]`, or None.
        lora: (A, B, scale) of a LoRA adapter on the head, or None.
        logit_scale: factor on the logits.
        logit_softcap: softcap of the scaled logits, or None.
    """

    weight: Tensor
    bias: Tensor | None
    lora: Lora | None
    logit_scale: float
    logit_softcap: float | None

    def arguments(self) -> dict[str, Any]:
        """Return the head as keyword arguments of the linear functions."""
        return self._asdict()


def _plain(_: nn.Module) -> tuple[float, float | None]:
    return 1.0, None


def _softcapped(model: nn.Module) -> tuple[float, float | None]:
    return 1.0, model.config.final_logit_softcapping  # type: ignore[union-attr, return-value]


def _multiplied(model: nn.Module) -> tuple[float, float | None]:
    return float(model.logit_scale), None  # type: ignore[arg-type]


def _divided(model: nn.Module) -> tuple[float, float | None]:
    return 1.0 / float(model.config.logits_scaling), None  # type: ignore[union-attr, arg-type]


#: model_type -> (logit_scale, logit_softcap) of a model, as in the sources of transformers.
_TRANSFORMS: dict[str, Callable[[nn.Module], tuple[float, float | None]]] = {
    "llama": _plain,
    "mistral": _plain,
    "olmo2": _plain,
    "qwen2": _plain,
    "qwen3": _plain,
    "gemma2": _softcapped,
    "gemma3_text": _softcapped,
    "cohere": _multiplied,
    "cohere2": _multiplied,
    "granite": _divided,
}


def lm_head(model: nn.Module) -> LmHead:
    """Return the LM head of a causal language model, with the model's scale and softcap.

    LoRA on the head (PEFT) and a trainable copy of it (`modules_to_save`) are supported. The head
    is only read, never called, so its hooks do not fire.

    Args:
        model: a `transformers` causal language model, or a PEFT model around one.

    Raises:
        ValueError: the model type, the head or its adapter is not one whose logits are known to
            be reproduced.

    Example:
        >>> import transformers
        >>> from fastrl.integrations.transformers import lm_head
        >>> config = transformers.CohereConfig(
        ...     vocab_size=32,
        ...     hidden_size=8,
        ...     intermediate_size=8,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=1,
        ...     logit_scale=0.0625,
        ...     pad_token_id=0,
        ... )
        >>> head = lm_head(transformers.AutoModelForCausalLM.from_config(config))
        >>> tuple(head.weight.shape), head.logit_scale
        ((32, 8), 0.0625)
    """
    causal = _unwrapped(model)
    kind = getattr(getattr(causal, "config", None), "model_type", type(causal).__name__)
    if kind not in _TRANSFORMS or not type(causal).__name__.endswith("ForCausalLM"):
        raise ValueError(
            f"model must be a causal language model of a known type ({', '.join(_TRANSFORMS)}), "
            f"got {type(causal).__name__} of type {kind}; for other models, pass weight, scale and "
            "softcap to the linear functions yourself"
        )
    scale, softcap = _TRANSFORMS[kind](causal)
    weight, bias, lora = _linear(causal.get_output_embeddings())  # type: ignore[operator]
    return LmHead(weight, bias, lora, scale, softcap)


def last_hidden_states(model: nn.Module, **inputs: Any) -> Tensor:
    """Return the input of the LM head: the backbone's last hidden states, `[B, T, H]`.

    Only the backbone is called, not the causal language model or a wrapper around it. Hooks
    (`register_forward_hook`, ...) on the latter do not fire; hooks on the backbone and its layers
    do.

    Args:
        model: as in `lm_head`.
        **inputs: `input_ids`, `attention_mask`, `position_ids`, ... as the model takes them.
    """
    states: Tensor = backbone(model)(**inputs, use_cache=False).last_hidden_state
    return states


def backbone(model: nn.Module) -> nn.Module:
    """Return what a causal language model computes its last hidden states with.

    Args:
        model: as in `lm_head`.
    """
    return _unwrapped(model).get_decoder()  # type: ignore[operator, no-any-return]


def modules_with_silent_hooks(model: nn.Module) -> list[str]:
    """Return the types of modules whose hooks `last_hidden_states` and `lm_head` do not fire.

    These are the causal language model, the wrappers around it and its head. Hooks of torch's
    data parallelism, accelerate and TRL are not reported: they are not needed here.

    Args:
        model: as in `lm_head`.
    """
    skipped = [*_wrappers_and_causal(model)]
    skipped.append(skipped[-1].get_output_embeddings())  # type: ignore[operator]
    return [type(module).__name__ for module in skipped if any(map(_is_the_users, _hooks(module)))]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for name in _HOOKS for hook in getattr(module, name, {}).values()]


def _is_the_users(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    home = f"{getattr(function, '__module__', None) or type(function).__module__}."
    return not home.startswith(("torch.distributed.", "accelerate.", "trl."))


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the causal language model inside DDP, torch.compile and PEFT wrappers."""
    *_, causal = _wrappers_and_causal(model)
    return causal


def _wrappers_and_causal(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model and what it wraps, down to the causal language model."""
    while True:
        yield model
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            _refuse_adapters_of_the_wrapper(model)
            yield model.base_model  # type: ignore[misc]
            model = model.get_base_model()  # type: ignore[operator]
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return


def _refuse_adapters_of_the_wrapper(model: nn.Module) -> None:
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            "model must not use a prompt-learning adapter: the wrapper adds its virtual tokens, "
            "not the backbone"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise ValueError(
            "model must not use an activated LoRA (alora_invocation_tokens): the wrapper tells the "
            "layers from which token on it applies, not the backbone"
        )


def _linear(head: Any) -> tuple[Tensor, Tensor | None, Lora | None]:
    """Return weight, bias and LoRA of a linear layer, plain or wrapped by PEFT."""
    if hasattr(head, "modules_to_save"):
        active = [name for name in head.active_adapters if name in head.modules_to_save]
        copied = active and not head.disable_adapters
        head = head.modules_to_save[active[0]] if copied else head.original_module
    if hasattr(head, "lora_A"):
        return _lora(head)
    if type(head) is not nn.Linear:
        raise ValueError(f"the LM head must be an nn.Linear, got {type(head).__name__}")
    return head.weight, head.bias, None


def _lora(head: Any) -> tuple[Tensor, Tensor | None, Lora | None]:
    base = head.base_layer
    if type(base) is not nn.Linear:
        raise ValueError(f"the LM head must be an nn.Linear, got {type(base).__name__}")
    if head.disable_adapters or head.merged:
        return base.weight, base.bias, None
    names = [name for name in head.active_adapters if name in head.lora_A]
    if not names:
        return base.weight, base.bias, None
    if len(names) > 1:
        raise ValueError(f"only one LoRA adapter of the LM head may be active, got {names}")
    (name,) = names
    if getattr(head, "use_dora", {}).get(name) or name in getattr(head, "lora_variant", {}):
        raise ValueError(f"the LM head's adapter {name!r} must be plain LoRA, got a variant (DoRA)")
    dropout = getattr(head.lora_dropout[name], "p", 0.0)
    if head.training and dropout:
        raise ValueError(f"lora_dropout on the LM head must be 0 in training, got {dropout}")
    a, b = head.lora_A[name], head.lora_B[name]
    if b.bias is not None:
        raise ValueError(f"the LM head's adapter {name!r} must have no bias")
    return base.weight, base.bias, (a.weight, b.weight, float(head.scaling[name]))
