"""The weights of a model under the names of its checkpoint, adapters merged."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_BASE = ".base_layer."


@torch.no_grad()
def plain_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights of the model, one after another.

    An adapter of PEFT is merged into one weight at a time, whose bits are restored before it is
    yielded: merging and unmerging would round the frozen weights again in every step.

    Args:
        model: A causal LM, or one that PEFT wraps with LoRA or DoRA.
    """
    wrapped = hasattr(model, "peft_config")
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")
        if not wrapped:
            yield name, parameter.detach()
        elif ".original_module." in name:  # replaced by the one in modules_to_save
            continue
        elif _BASE in name and name.endswith(f"{_BASE}weight"):
            layer = model.get_submodule(name.removesuffix(f"{_BASE}weight"))
            yield plain.replace(_BASE, "."), _merged(layer, parameter)
        elif _BASE in name:  # a bias, which LoRA leaves alone
            yield plain.replace(_BASE, "."), parameter.detach()
        elif model.base_model.prefix not in name:
            yield plain, parameter.detach()


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """The weight of a layer with its adapter, as a tensor of its own."""
    before = weight.detach().clone()
    layer.merge()
    try:
        return weight.detach().clone()
    finally:
        layer.unmerge()
        weight.data.copy_(before)
