"""The sizes of a model that its memory depends on, from its configuration alone."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.model.loading import pretrained_config, reason
from fastrl.train.model.small_model import character_tokenizer, small_model


class Shape(NamedTuple):
    """The sizes of a model that its memory depends on, in elements."""

    layers: int
    hidden: int
    inner: int  # the MLP's
    queries: int  # heads times their width
    keys: int  # key heads times their width
    vocabulary: int
    normed_heads: bool  # norms of queries and keys
    weights: int  # all parameters
    embeddings: int  # of these the embeddings and the head
    tied: bool
    trained: int  # parameters with a gradient; those of the adapter with LoRA
    adapter: int  # the parameters that LoRA adds


def model_shape(config: GrpoConfig | PpoConfig) -> Shape:
    """The sizes of the model that the settings name; its weights are not loaded.

    Raises:
        ValueError: There is no such model, or its layers are of another kind.
    """
    if config.model is None:
        model: Any = small_model(character_tokenizer())
        of_model = model.config
    else:
        try:
            of_model = pretrained_config(config.model)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(of_model, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"model must be a causal LM with a configuration, got {config.model!r}: "
                f"{reason(error, config.model)}"
            ) from error
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in needed if not isinstance(getattr(of_model, name, None), int)]
    if missing or any("experts" in name for name, _ in model.named_modules()):
        raise ValueError(
            f"plan: model must have layers of attention and an MLP, got {of_model.model_type} "
            f"{'without ' + ', '.join(missing) if missing else 'with experts'}"
        )
    heads = of_model.num_attention_heads
    width = getattr(of_model, "head_dim", None) or of_model.hidden_size // heads
    keys = getattr(of_model, "num_key_value_heads", None) or heads
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight or bool(of_model.tie_word_embeddings)
    embeddings = embedding.weight.numel() + (0 if tied else head.weight.numel())
    weights = sum(p.numel() for p in set(model.parameters()))
    if tied and head.weight is not embedding.weight:
        weights -= head.weight.numel()
    adapter = _adapter(model, config, head)
    trained = adapter or weights - (embeddings if config.freeze_head else 0)
    return Shape(
        layers=of_model.num_hidden_layers,
        hidden=of_model.hidden_size,
        inner=of_model.intermediate_size,
        queries=heads * width,
        keys=keys * width,
        vocabulary=head.weight.shape[0],
        normed_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        weights=weights,
        embeddings=embeddings,
        tied=tied,
        trained=trained,
        adapter=adapter,
    )


def _adapter(model: nn.Module, config: GrpoConfig | PpoConfig, head: nn.Module) -> int:
    """The parameters that LoRA adds."""
    if config.lora_rank is None:
        return 0
    everywhere = config.lora_targets == ("all-linear",)
    targets = tuple(f".{target}" for target in config.lora_targets)
    total = 0
    for name, module in model.named_modules():
        targeted = module is not head if everywhere else f".{name}".endswith(targets)
        if isinstance(module, nn.Linear) and targeted:
            total += config.lora_rank * (module.in_features + module.out_features)
            total += module.out_features if config.dora else 0
    if not total:
        raise ValueError(
            f"lora_targets must be names of linear layers of the model, got {config.lora_targets}"
        )
    return total
