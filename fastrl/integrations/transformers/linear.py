"""The linear layer of an LM head: plain, wrapped by FSDP1 or by PEFT."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastrl.integrations.transformers.wrappers import LOGITS, unwrapped_once
from fastrl.ops.linear_token_stats import Lora


class HeadLayers(NamedTuple):
    """The layers of an LM head.

    Attributes:
        wrappers: the head as the model calls it, and the modules between it and the linear layer.
        linear: the linear layer.
        lora: the layers A and B and the scale of an adapter, or None.
    """

    wrappers: tuple[nn.Module, ...]
    linear: nn.Linear
    lora: tuple[nn.Linear, nn.Linear, float] | None

    def called(self) -> list[nn.Module]:
        """Return the modules in whose forward all parameters are gathered, outermost first."""
        adapter = [] if self.lora is None else list(self.lora[:2])
        return [*self.wrappers, self.linear, *adapter]

    def parameters(self) -> tuple[Tensor, Tensor | None, Lora | None]:
        """Return weight, bias and LoRA as the linear functions take them."""
        lora = self.lora
        adapter = None if lora is None else (lora[0].weight, lora[1].weight, lora[2])
        return self.linear.weight, self.linear.bias, adapter


def head_layers(head: Any) -> HeadLayers:
    """Return the layers of an LM head.

    Raises:
        ValueError: the head is not a linear layer, or has an adapter that is not plain LoRA.
    """
    wrappers = []
    while True:
        if hasattr(head, "modules_to_save"):
            wrappers.append(head)
            active = [name for name in head.active_adapters if name in head.modules_to_save]
            copied = active and not head.disable_adapters
            head = head.modules_to_save[active[0]] if copied else head.original_module
        elif (inner := unwrapped_once(head)) is not None:
            wrappers.append(head)
            head = inner
        elif hasattr(head, "lora_A"):
            wrappers.append(head)
            linear, lora = _lora(head)
            return HeadLayers(tuple(wrappers), linear, lora)
        else:
            return HeadLayers(tuple(wrappers), _linear(head), None)


def _linear(layer: Any) -> nn.Linear:
    if layer is None:
        raise ValueError(
            "the model must have an LM head, got none: load it with `AutoModelForCausalLM`"
        )
    # FSDP2 gives the layer a class of its own, whose forward is still nn.Linear's
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise ValueError(
            f"the LM head must be an nn.Linear, got {type(layer).__name__}: fastrl does not know "
            f"how it computes logits; {LOGITS}"
        )
    weight = layer.weight
    if is_traceable_wrapper_subclass(weight) and not hasattr(weight, "full_tensor"):
        raise ValueError(
            f"the weight of the LM head must be a plain tensor, got {type(weight).__name__} "
            f"(quantized): fastrl cannot multiply in its format; {LOGITS}"
        )
    return layer


def _lora(head: Any) -> tuple[nn.Linear, tuple[nn.Linear, nn.Linear, float] | None]:
    base = _linear(head.base_layer)
    if head.disable_adapters or head.merged:
        return base, None
    names = [name for name in head.active_adapters if name in head.lora_A]
    if not names:
        return base, None
    if len(names) > 1:
        raise ValueError(f"only one LoRA adapter of the LM head may be active, got {names}")
    (name,) = names
    if getattr(head, "use_dora", {}).get(name) or name in getattr(head, "lora_variant", {}):
        raise ValueError(f"the LM head's adapter {name!r} must be plain LoRA, got a variant (DoRA)")
    dropout = getattr(head.lora_dropout[name], "p", 0.0)
    if head.training and dropout:
        raise ValueError(f"lora_dropout on the LM head must be 0 in training, got {dropout}")
    a, b = head.lora_A[name], head.lora_B[name]
    if not (hasattr(a, "weight") and hasattr(b, "weight")):
        raise ValueError(
            f"the LM head's adapter {name!r} must be plain LoRA, got {type(head).__name__}"
        )
    if b.bias is not None:
        raise ValueError(f"the LM head's adapter {name!r} must have no bias")
    return base, (a, b, float(head.scaling[name]))
