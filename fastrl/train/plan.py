"""The peak memory of a run, predicted from its settings and the model's configuration.

``python -m fastrl.train.grpo --plan --model NAME ...`` prints it part by part without loading any
weights; ``--plan 24`` also says what to switch on for the run to fit 24 GiB. The formula is stated
in `docs/long-sequences.md`; ``python bench/train_memory.py`` compares it with measurements.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from fastrl.train.config import GrpoConfig, LoopConfig, PpoConfig
from fastrl.train.model_shape import Shape, model_shape

GIB = 2**30
#: Bytes of logits in a chunk of the linear loss, with what belongs to it: `fastrl.ops._linear`.
_CHUNK = {"cpu": 192 * 2**20, "gpu": 508 * 2**20}


@dataclass(frozen=True)
class Plan:
    """Bytes per part. The peak is in the generation, in the loss, or in the backward of a layer."""

    weights: float
    gradients: float
    optimizer: float
    kept: float  # activations that the forward keeps: all, or the input of each layer
    layer: float  # the layer that is recomputed, and gradients on their way through it
    states: float  # the last hidden states and their gradient
    loss: float  # a chunk of logits, or all of them and their gradient
    head: float  # the gradient of the head, which the loss computes
    update: float  # what the optimizer computes with of the largest weight
    cache: float  # keys and values of the sequences that are generated together
    host: float  # what is in host memory instead
    several: bool  # whether there are gradients of earlier micro-batches

    @property
    def generation(self) -> float:
        """The peak of the generation: no gradients are left from the step before."""
        return self.weights + self.optimizer + self.cache

    @property
    def learning(self) -> float:
        """The peak of a minibatch: in the loss, the backward of a layer, or the update."""
        in_loss = self.states + self.loss + self.head + (self.gradients if self.several else 0)
        in_layer = self.gradients + self.layer + (self.head if self.several else 0)
        in_update = self.gradients + self.update
        return (
            self.weights
            + self.optimizer
            + max(self.kept + in_loss, self.kept + in_layer, in_update)
        )

    @property
    def peak(self) -> float:
        """The larger of both."""
        return max(self.generation, self.learning)


def plan(
    config: GrpoConfig | PpoConfig,
    model: Shape,
    *,
    tokens: int,
    device: str,
    total: int | None = None,
) -> Plan:
    """Predict the memory of a run whose longest sequence has ``tokens`` tokens.

    Args:
        config: The settings.
        model: The model's sizes.
        tokens: The longest prompt and completion.
        device: ``"cpu"`` or ``"gpu"``.
        total: The tokens of all sequences of a minibatch; by default all are the longest.
    """
    sequences = config.prompts_per_step * getattr(config, "group_size", 1)
    if total is None:
        total = -(-sequences // config.minibatches) * tokens
    row = min(max(config.tokens_per_micro_batch, tokens), total)
    wide = 4 if config.weights == "float32" else 2
    weights = float(model.weights * wide + 4 * model.adapter)
    if config.kl_coef > 0 and not model.adapter:  # the reference
        weights += model.weights * wide
    if _autocasts(config):  # copies of all weights of the layers
        weights += 2 * (model.weights - model.embeddings)
    optimizer, host = _optimizer_bytes(config, model)
    kept, layer = _activation_bytes(config, model, row)
    head_trained = not model.adapter and not config.freeze_head
    head = model.vocabulary * model.hidden
    if head_trained:  # the gradient of the embeddings comes after all layers
        layer = max(layer, head * wide - kept)
    if config.offload_checkpoints:
        host += kept
        kept = 2 * kept / model.layers  # the one in use and the one on its way
    return Plan(
        weights=weights,
        gradients=float(model.trained * (4 if model.adapter else wide)),
        optimizer=optimizer,
        kept=kept,
        layer=layer,
        states=float(row * _states_width(config, model)),
        loss=_loss_bytes(config, model, row, device),
        head=4.0 * head if head_trained else 0.0,
        update=_update_bytes(config, model, head if head_trained else 0, device),
        cache=_cache_bytes(config, model, sequences, tokens),
        host=host,
        several=row < total,
    )


def layer_bytes(config: GrpoConfig | PpoConfig, model: Shape) -> int:
    """What autograd keeps of a layer, per token, without gradient checkpointing.

    The inputs of the norms, in float32, and what they normalized, if their weights are trained; the
    inputs of the linear layers; the queries, keys and values that enter the attention, and what
    leaves it; of the MLP the gate, its activation and up. With ``mlp_tile`` of norms the input
    alone, and of the MLP one tile of `inner_bytes` in all.
    """
    element = _element(config)
    of_norms = 2 * _norm_bytes(config, model, _stream(config)) * model.hidden
    if model.normed_heads:
        of_norms += _norm_bytes(config, model, element) * (model.queries + model.keys)
    attended = (2 * model.queries + 2 * model.keys) * element
    size, shared = _linear_inputs(config, model)
    inputs = size * ((1 if shared else 3) * model.hidden + model.queries)
    if config.mlp_tile is not None:
        return of_norms + attended + inputs + model.hidden * element
    return of_norms + attended + inputs + inner_bytes(config, model)


def inner_bytes(config: GrpoConfig | PpoConfig, model: Shape) -> int:
    """Of these the MLP's: gate, its activation and up, and the inputs of its linear layers."""
    size, shared = _linear_inputs(config, model)
    inputs = size * ((1 if shared else 2) * model.hidden + model.inner)
    return 3 * model.inner * _element(config) + inputs


def _norm_bytes(config: GrpoConfig | PpoConfig, model: Shape, width: int) -> int:
    """Per element: the input in float32 and what was normalized, or only the input as it is."""
    if config.mlp_tile is not None:
        return width
    normalized = max(width, _element(config)) if not model.adapter else 0
    return 4 + normalized


def _linear_inputs(config: GrpoConfig | PpoConfig, model: Shape) -> tuple[int, bool]:
    """Bytes per element of the inputs of linear layers, and whether layers share one copy.

    Autocast copies the input for each layer. So does an adapter, which is float32, on bfloat16
    weights, while those, which are not trained, do not need theirs.
    """
    own = bool(model.adapter) and config.weights == "bfloat16"
    size = 4 if own and config.precision == "float32" else _element(config)
    return size, not (_autocasts(config) or own)


def _activation_bytes(
    config: GrpoConfig | PpoConfig, model: Shape, row: int
) -> tuple[float, float]:
    """What the forward keeps of all layers, and what the backward of one layer adds."""
    of_layer, inner = layer_bytes(config, model), inner_bytes(config, model)
    stream, element = _stream(config) * model.hidden, _element(config)
    tile = row if config.mlp_tile is None else min(config.mlp_tile, row)
    recomputed = 0 if config.mlp_tile is None else tile * inner
    attention = row * (2 * model.queries + 2 * model.keys) * element
    mlp = tile * 2 * model.inner * element
    on_their_way = 2 * row * stream  # gradients of the layer's input and output
    if not config.gradient_checkpointing:
        kept = float(model.layers * row * of_layer)
        return kept, float(recomputed + on_their_way + max(attention, mlp))
    if config.mlp_tile is not None or _stream(config) == 4:
        of_layer -= stream  # the input of the first norm is the one that is kept
    # the backward frees the second norm and the MLP before it comes to the attention
    norm = _norm_bytes(config, model, _stream(config)) * model.hidden
    second = norm + (inner if config.mlp_tile is None else model.hidden * element)
    in_mlp, in_attention = row * of_layer + recomputed + mlp, row * (of_layer - second) + attention
    return float(model.layers * row * stream), float(on_their_way + max(in_mlp, in_attention))


def _states_width(config: GrpoConfig | PpoConfig, model: Shape) -> int:
    """Bytes per token of the last norm, of the states at the scored tokens and their gradient."""
    return (_norm_bytes(config, model, _stream(config)) + 2 * _element(config)) * model.hidden


def _loss_bytes(config: GrpoConfig | PpoConfig, model: Shape, row: int, device: str) -> float:
    """A chunk of logits and the head's copy for tensor cores; or all logits and their gradient."""
    if config.loss == "logits":
        return 2.0 * row * model.vocabulary * _element(config)
    copy = 2.0 * model.vocabulary * model.hidden if device == "gpu" and _autocasts(config) else 0.0
    return copy + min(_CHUNK[device], row * model.vocabulary * 4)


def _update_bytes(config: GrpoConfig | PpoConfig, model: Shape, head: int, device: str) -> float:
    """The float32 gradient, moments and so on of the largest weight, one weight at a time."""
    largest = 0 if model.adapter else max(head, model.hidden * model.inner)
    masters = config.weights == "bfloat16" and config.rounding == "master"
    torchao = config.optimizer == "adamw_8bit" or config.rounding == "stochastic"
    fused = device == "gpu" or config.optimizer == "adamw_offloaded"
    copies = 4 if torchao else 0 if fused else 2
    return 4.0 * largest * (copies + masters)


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


def report(config: LoopConfig, limit: float) -> str:
    """The plan as text: each part, both peaks, and what to switch on to fit ``limit`` GiB.

    Raises:
        ValueError: The loop, or the model, is not of a kind that can be planned.
    """
    if not isinstance(config, (GrpoConfig, PpoConfig)):
        raise ValueError(  # noqa: TRY004
            f"plan: only the memory of grpo and ppo can be predicted, not of {config.loop}"
        )
    if config.attention in ("sdpa", "eager"):
        raise ValueError(
            "plan: attention must be by_sequence, flash_attention_2 or flex_attention, since "
            f"{config.attention} takes memory by the square of a row"
        )
    if isinstance(config, PpoConfig) and config.value_model == "separate":
        raise ValueError("plan: value_model must be shared, since a separate one is not counted")
    model = model_shape(config)
    tokens = config.max_prompt_tokens + config.max_new_tokens
    device = "cpu" if config.device == "cpu" else "gpu"
    found = plan(config, model, tokens=tokens, device=device)
    if not limit > 0:
        raise ValueError(f"plan must be above 0 GiB, got {limit:g}")
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
    if not changes:
        return "\n".join([*lines, f"{verdict} {limit:g} GiB, with everything on"])
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
        "gradient of the head": found.head,
        "update of a weight": found.update,
        "cache of generation": found.cache,
        "in host memory": found.host,
        "peak of generation": found.generation,
        "peak of learning": found.learning,
    }
    return [f"{name:24}{size / GIB:10.2f} GiB" for name, size in rows.items()]
