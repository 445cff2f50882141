"""Transfer of the weights of a trainer's model to a vLLM engine in the same process."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def hand_over_weights(llm: Any, model: Any) -> None:
    """Give a vLLM engine (0.32) the current weights of a `transformers` model, with LoRA merged.

    `reload_weights` packs the weights for a CPU again, which the `load_weights` of the engine's
    model cannot. To verify that the engine uses the new weights, compare some log-probabilities.

    Args:
        llm: A ``vllm.LLM`` in this process, with the architecture of the model.
        model: A causal LM, with or without PEFT's wrapper.
    """
    llm.collective_rpc("reload_weights", args=(plain_weights(model),))
    llm.apply_model(_pack_head)


@torch.no_grad()
def plain_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by their names in a checkpoint; an adapter is merged.

    Frozen weights are restored exactly, because merging and unmerging would round them in every
    step.
    """
    if not hasattr(model, "peft_config"):
        yield from ((name, weight.detach()) for name, weight in model.named_parameters())
        return
    for name, weight in model.get_base_model().named_parameters():
        if name.endswith(".base_layer.weight"):
            layer = model.get_base_model().get_submodule(name.removesuffix(".base_layer.weight"))
            before = weight.detach().clone()
            layer.merge()
            merged = weight.detach().clone()
            layer.unmerge()
            weight.copy_(before)
            yield name.replace(".base_layer.", "."), merged
        elif model.base_model.prefix not in name:
            yield name.replace(".base_layer.", "."), weight.detach()


def _pack_head(engine_model: Any) -> None:
    """Pack the head for a CPU again, since a tied head is not among the weights."""
    head: Any = getattr(engine_model, "lm_head", None)
    if hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
