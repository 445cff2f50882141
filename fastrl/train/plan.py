"""The peak memory of a run, predicted from its settings and the model's configuration.

``python -m fastrl.train.grpo --plan --model NAME ...`` prints it part by part without loading any
weights; ``--plan 24`` also says what to switch on for the run to fit 24 GiB. The formula is stated
in `docs/long-sequences.md`; ``python bench/train_memory.py`` compares it with measurements.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.small_model import character_tokenizer, small_model

GIB = 2**30
#: Bytes of logits in a chunk of the linear loss, with what belongs to it: `fastrl.ops._linear`.
_CHUNK = {"cpu": 192 * 2**20, "gpu": 508 * 2**20}


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


@dataclass(frozen=True)
class Plan:
    """Bytes per part. The peak is at the end of generation, in the loss, or in the backward."""

    weights: float
    gradients: float
    optimizer: float
    kept: float  # activations that the forward keeps: all, or the input of each layer
    layer: float  # the layer that is recomputed, and gradients on their way
    states: float  # last hidden states and their gradient
    loss: float  # a chunk of logits, or all of them, and the gradient of the head
    cache: float  # keys and values of the sequences that are generated together
    host: float  # what is in host memory instead

    @property
    def resident(self) -> float:
        """Weights, gradients and the optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def generation(self) -> float:
        """The peak of the generation: no gradients are left from the step before."""
        return self.weights + self.optimizer + self.cache

    @property
    def learning(self) -> float:
        """The peak of a micro-batch, in the loss or in the backward of a layer."""
        return self.resident + self.kept + self.states + max(self.loss, self.layer)

    @property
    def peak(self) -> float:
        """The larger of both."""
        return max(self.generation, self.learning)


def plan(config: GrpoConfig | PpoConfig, model: Shape, *, tokens: int, device: str) -> Plan:
    """Predict the memory of a run whose longest sequence has ``tokens`` tokens.

    Args:
        config: The settings.
        model: The model's sizes.
        tokens: The longest prompt and completion.
        device: ``"cpu"`` or ``"gpu"``.
    """
    sequences = config.prompts_per_step * getattr(config, "group_size", 1)
    row = min(max(config.tokens_per_micro_batch, tokens), sequences * tokens)
    wide = 4 if config.weights == "float32" else 2
    weights = float(model.weights * wide + 4 * model.adapter)
    if _autocasts(config):  # copies of all weights of the layers
        weights += 2 * (model.weights - model.embeddings)
    optimizer, offloaded = _optimizer_bytes(config, model)
    kept, layer = _activation_bytes(config, model, row)
    embeddings = 0
    if not model.adapter and not config.freeze_head:  # their gradient, after all layers
        embeddings = model.vocabulary * model.hidden * wide
    host = offloaded
    if config.offload_checkpoints:
        host += kept
        kept = 2 * kept / model.layers  # the one in use and the one on its way
    return Plan(
        weights=weights,
        gradients=float(model.trained * (4 if model.adapter else wide)),
        optimizer=optimizer,
        kept=kept,
        layer=max(layer, embeddings - kept),
        states=row * (2 * _stream(config) + _element(config)) * model.hidden,
        loss=_loss_bytes(config, model, row, device, several=row < sequences * tokens),
        cache=_cache_bytes(config, model, sequences, tokens),
        host=host,
    )


def layer_bytes(config: GrpoConfig | PpoConfig, model: Shape) -> int:
    """What autograd keeps of a layer, per token, without recomputation.

    Of each norm its input in float32, the normalized input, and its output as the linear layers
    take it: one copy, or under autocast one for each of them. Of the attention the queries, keys
    and values as they enter it, its output and the input of the output projection; with norms of
    queries and keys also the input of these and what they normalized. Of the MLP its inner part.
    """
    element = _element(config)
    norms = 2 * (4 + 4) + (3 + 2) * 2 if _autocasts(config) else 2 * (4 + 2 * element)
    heads = (3 * model.queries + 2 * model.keys) * element
    if model.normed_heads:
        heads += (model.queries + model.keys) * (4 + element)
    return norms * model.hidden + heads + inner_bytes(config, model)


def inner_bytes(config: GrpoConfig | PpoConfig, model: Shape) -> int:
    """Of these the inner part of the MLP: gate, its activation, up, and their product."""
    return 4 * model.inner * _element(config)


def _activation_bytes(
    config: GrpoConfig | PpoConfig, model: Shape, row: int
) -> tuple[float, float]:
    """What the forward keeps of all layers, and what the backward of one layer adds."""
    inner = inner_bytes(config, model)
    outside = layer_bytes(config, model) - inner
    tile = row if config.mlp_tile is None else min(config.mlp_tile, row)
    stream, element = _stream(config) * model.hidden, _element(config)
    if config.gradient_checkpointing:
        kept = float(model.layers * row * stream)
        layer = row * outside + tile * inner
    elif config.mlp_tile is not None:
        kept = float(model.layers * row * outside)
        layer = tile * inner
    else:
        kept = float(model.layers * row * (outside + inner))
        layer = 0
    # gradients on their way: of the layer's input and output, and of the attention or the MLP
    attention = row * (2 * model.queries + 2 * model.keys) * element
    mlp = tile * 2 * model.inner * element
    return kept, float(layer + 2 * row * stream + max(attention, mlp))


def _loss_bytes(
    config: GrpoConfig | PpoConfig, model: Shape, row: int, device: str, *, several: bool
) -> float:
    """A chunk of logits, or all of them and their gradient; and the head's gradient."""
    head = model.vocabulary * model.hidden
    trained = not model.adapter and not config.freeze_head
    element = _element(config)
    # beside the gradient of earlier micro-batches
    gradient = 4.0 * head if trained and several else 0.0
    if config.loss == "logits":
        return gradient + 2.0 * row * model.vocabulary * element
    copies = 2.0 * head if device == "gpu" and _autocasts(config) else 0.0
    chunk = min(_CHUNK[device], row * model.vocabulary * 4)
    return gradient + copies + chunk + row * model.hidden * element


def _cache_bytes(
    config: GrpoConfig | PpoConfig, model: Shape, sequences: int, tokens: int
) -> float:
    """Keys and values of the sequences that are generated together, and a step's logits."""
    together = max(1, min(sequences, config.tokens_per_generation // tokens))
    # under autocast the norms of the keys and the rotation make the keys float32
    of_keys = 4 if _autocasts(config) else _element(config)
    pairs = model.layers * model.keys * (of_keys + _element(config))
    step = model.vocabulary * (4 + 4 + 8)  # logits, probabilities, cumulative sums
    return float(together * (tokens * pairs + step))


def _autocasts(config: GrpoConfig | PpoConfig) -> bool:
    return config.precision == "bfloat16" and config.weights == "float32"


def _element(config: GrpoConfig | PpoConfig) -> int:
    """Bytes of an element of what the linear layers compute."""
    return 2 if "bfloat16" in (config.precision, config.weights) else 4


def _stream(config: GrpoConfig | PpoConfig) -> int:
    """Bytes of an element of the stream between the layers."""
    return 2 if config.weights == "bfloat16" else 4


def _optimizer_bytes(config: GrpoConfig | PpoConfig, model: Shape) -> tuple[float, float]:
    """The optimizer's bytes on the device and on the host."""
    trained = model.trained
    half = config.weights == "bfloat16" and not model.adapter
    states = (2 * (1 + 4 / 256) if config.optimizer == "adamw_8bit" else 8.0) * trained
    if config.optimizer == "adamw_offloaded":
        return 0.0, states + 4 * trained
    masters = 4.0 * trained if half and config.rounding == "master" else 0.0
    return states + masters, 0.0


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
            of_model = AutoConfig.from_pretrained(config.model)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(of_model)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"model must be a causal LM with a configuration, got {config.model!r}: {error}"
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
    if config.lora_rank is None:
        return 0
    everywhere = config.lora_targets == ("all-linear",)
    total = 0
    for name, module in model.named_modules():
        targeted = module is not head if everywhere else name.endswith(config.lora_targets)
        if isinstance(module, nn.Linear) and targeted:
            total += config.lora_rank * (module.in_features + module.out_features)
            total += module.out_features if config.dora else 0
    return total


def to_fit(
    config: GrpoConfig | PpoConfig, model: Shape, *, tokens: int, device: str, limit: float
) -> tuple[dict[str, Any], Plan]:
    """Switches, from the cheapest on, with which the run fits ``limit`` bytes; all if it cannot."""
    changes: dict[str, Any] = {}
    best = plan(config, model, tokens=tokens, device=device)
    for name, value in _switches(config, tokens, device):
        if best.peak <= limit:
            break
        tried = plan(replace(config, **{name: value}), model, tokens=tokens, device=device)
        if tried.peak < best.peak:
            config, best = replace(config, **{name: value}), tried
            changes[name] = value
    return changes, best


def _switches(config: GrpoConfig | PpoConfig, tokens: int, device: str) -> list[tuple[str, Any]]:
    """Settings that save memory without changing results, in order of their cost in time."""
    switches: list[tuple[str, Any]] = [
        ("tokens_per_micro_batch", tokens),
        ("tokens_per_generation", 8 * tokens),
        ("loss", "linear"),
        ("gradient_checkpointing", True),
        ("mlp_tile", 2048),
        ("tokens_per_generation", tokens),
    ]
    return switches + ([("offload_checkpoints", True)] if device == "gpu" else [])


def report(config: GrpoConfig | PpoConfig, limit: float) -> str:
    """The plan as text: each part, both peaks, and what to switch on to fit ``limit`` GiB.

    Raises:
        ValueError: The model is not of a kind that can be planned.
    """
    model = model_shape(config)
    tokens = config.max_prompt_tokens + config.max_new_tokens
    device = "cpu" if config.device == "cpu" else "gpu"
    found = plan(config, model, tokens=tokens, device=device)
    lines = [
        f"{model.weights / 1e9:.2f} billion weights, {model.trained / 1e6:.1f} million trained; "
        f"sequences of {tokens} tokens",
        *_table(found),
    ]
    if limit == math.inf:
        return "\n".join(lines)
    if found.peak <= limit * GIB:
        return "\n".join([*lines, f"fits {limit:g} GiB"])
    changes, best = to_fit(config, model, tokens=tokens, device=device, limit=limit * GIB)
    switches = " ".join(
        f"--{name}" if value is True else f"--{name} {value}" for name, value in changes.items()
    )
    verdict = "fits" if best.peak <= limit * GIB else "does not fit"
    return "\n".join([*lines, f"{verdict} {limit:g} GiB with {switches}:", *_table(best)])


def _table(found: Plan) -> list[str]:
    rows = {
        "weights": found.weights,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "activations kept": found.kept,
        "activations of a layer": found.layer,
        "last hidden states": found.states,
        "loss workspace": found.loss,
        "cache of generation": found.cache,
        "in host memory": found.host,
        "peak of generation": found.generation,
        "peak of learning": found.learning,
    }
    return [f"{name:24}{size / GIB:10.2f} GiB" for name, size in rows.items()]
