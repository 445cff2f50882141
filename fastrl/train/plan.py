"""The peak memory of a run, predicted from its settings and the model's configuration.

``fastrl grpo --plan 24 --model NAME ...`` prints the memory part by part without loading weights,
and names the options with which the run fits 24 GiB; `docs/long-sequences.md` explains them.
``python bench/studies/train_memory.py`` compares the prediction with measurements.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from fastrl.integrations.transformers.by_sequence import BY_SEQUENCE
from fastrl.train.config import GrpoConfig, PpoConfig, RunConfig
from fastrl.train.model_shape import Sequences, Shape, activations
from fastrl.train.warm_start import warm_start_prompts, warm_start_steps

GIB = 2**30
#: Bytes of a chunk of the linear loss, and of a block of converted weights, as in fastrl.ops.
_CPU_CHUNK, _GPU_CHUNK, _BLOCK = 192 * 2**20, 508 * 2**20, 16 * 2**20
#: Bytes of a chunk of rows that kept fewer tokens than a _FEW-th of the vocabulary.
_KEPT_CHUNK, _FEW = {"cpu": 16 * 2**20, "gpu": 256 * 2**20}, 256
#: Bytes per weight: 4 bits, and an 8-bit scale of 64 weights, of which 256 share a float32.
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)


class Plan(NamedTuple):
    """The bytes of each part. The peak is in the generation, a minibatch or the warm start."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # kept by the forward: all, or the input of each layer
    layer_activations: float  # for the forward or backward of a layer, beyond the kept ones
    # a chunk of logits, then a copy of the head's gradient; or all logits and their gradient; and
    # the gradient of the hidden states
    loss_workspace: float
    head_gradient: float  # the gradient of the head, which the loss computes
    weight_update: float  # temporary tensors of the optimizer, for one weight after another
    generation_cache: float  # keys and values of the sequences that are generated together
    top_logprobs: float  # ids and log-probabilities for score centering, of a step
    host_memory: float  # bytes that are in host memory instead
    learning: float  # the peak of a minibatch
    warm_start: float  # the peak of the supervised steps below an adapter, of all weights

    @property
    def generation(self) -> float:
        """The peak during generation, before there are gradients."""
        return self.weights + self.optimizer + self.generation_cache + self.top_logprobs

    @property
    def peak(self) -> float:
        """The largest of the peaks."""
        return max(self.generation, self.learning, self.warm_start)


class Minibatch(NamedTuple):
    """A minibatch whose prompts and completions are as long as the settings allow."""

    sequences: Sequences  # in a row
    row: int  # the most tokens of a micro-batch
    scored: int  # of them the loss has so many rows
    several: bool  # whether there are several micro-batches

    @classmethod
    def of(cls, config: RunConfig) -> "Minibatch":
        """Return the minibatch; its rows are full, as those of shorter sequences can be."""
        prompt, new = config.max_prompt_tokens, config.max_new_tokens
        limit, group = config.tokens_per_micro_batch, config.group_size
        completions = -(-config.prompts_per_step // config.minibatches) * group
        if isinstance(config, PpoConfig) and config.minibatches > 1:  # any completions
            completions = -(-config.prompts_per_step * group // config.minibatches)
            group = 1
        if config.attention != BY_SEQUENCE:
            group = 1
        # a completion's last token is in no row
        together = max(1, min(group, (limit - prompt) // max(1, new - 1)))
        sequences = Sequences(prompt, new - 1, together)
        prompts = -(-completions // group) * -(-group // together)
        total = prompts * prompt + completions * (new - 1)
        row = min(max(limit, prompt + new - 1), total)
        scored = min(-(-row * together * new // sequences.tokens), completions * new)
        return cls(sequences, row, scored, row < total)


def plan(config: RunConfig, model: Shape, *, device: str) -> Plan:
    """Predict the memory of a run in which prompts and completions are as long as allowed.

    Args:
        config: The settings.
        model: The model's sizes.
        device: ``"cpu"`` or ``"gpu"``.
    """
    batch = Minibatch.of(config)
    row, scored = batch.row, batch.scored
    wide, element = model.wide, model.element
    # the value head of PPO: two layers, in float32, on the hidden states
    values = (model.hidden + 2) * model.hidden + 1 if getattr(config, "has_values", False) else 0

    weights = float(wide * model.weights + 4 * (model.adapter + values))
    if config.weights == "nf4":
        weights -= (wide - _NF4) * sum(model.matrices)
    if config.kl_coef > 0 and not model.adapter:  # the reference
        weights += wide * model.weights
    gradients = float((4 if model.adapter else wide) * model.trained + 4 * values)
    optimizer, update = _optimizer_bytes(config, model, values, device)

    settings = (config.precision, config.gradient_checkpointing, config.mlp_tile)
    of = activations(model, settings, batch.sequences, row)
    states = of.states + (values > 0) * scored * model.hidden * (12 - element)
    layer = of.backward + (2 * max(model.matrices) if config.weights == "nf4" else 0)
    # of the checkpoints that move to the host, the one in use and the one in transfer remain
    kept = states + (2 * of.kept / model.layers if config.offload_checkpoints else of.kept)

    head = model.vocabulary * model.hidden * (not model.adapter and not config.freeze_head)
    logits = scored * model.vocabulary * element
    if config.loss == "logits":  # ppo keeps them in the backward, which copies the gradient
        loss = float((2 + isinstance(config, PpoConfig)) * logits)
        of_head = max(0, head * wide - logits)  # the logits are freed first
    else:  # the gradient is accumulated in float32 and then rounded, when the chunk is gone
        rounded = 2.0 * head * (wide == 2)
        loss = max(_chunk_bytes(config, model, batch, device, rounded), rounded)
        of_head = 4 * head
    centered = min(config.score_centering or 0, model.vocabulary)
    # a micro-batch has a copy of its tokens' numbers, and the loss one of the ids in int64
    loss += scored * (model.hidden * element + 16 * centered)
    top = 8 * config.prompts_per_step * config.group_size * config.max_new_tokens * centered
    earlier = gradients if batch.several else 0.0  # those of earlier micro-batches
    moments = (
        earlier + kept + max(of.forward, loss + of_head),
        max(earlier, head * wide) + kept + layer,  # the last layer
        gradients + of.kept / model.layers + layer,  # the first one
        gradients + (head * wide if model.tied or batch.several else 0),  # the embeddings
        gradients + update,
    )
    host = of.kept if config.offload_checkpoints else 0.0
    if config.optimizer == "adamw_offloaded":
        optimizer, host = 0.0, host + optimizer
    cache = _cache_bytes(config, model)
    learning = weights + optimizer + top + max(moments)
    parts = (weights, gradients, optimizer, kept, max(layer, of.forward), loss, of_head, update)
    return Plan(*map(float, (*parts, cache, top, host, learning, _warm_start(config, device))))


def _warm_start(config: RunConfig, device: str) -> float:
    """Return the peak of supervised steps below an adapter, which train all weights."""
    if config.lora_rank is None or not warm_start_steps(config):
        return 0.0
    changes: dict[str, Any] = {"lora_rank": None, "lora_targets": ("all-linear",)}
    changes["score_centering"] = None
    changes |= {"kl_coef": 0.0, "minibatches": 1}  # the reference comes later
    changes["prompts_per_step"] = max(config.prompts_per_step, warm_start_prompts(config))
    if isinstance(config, PpoConfig):
        changes["kl_target"] = None
    of_all = replace(config, **changes)
    return plan(of_all, Shape(of_all), device=device).learning


def _chunk_bytes(
    config: RunConfig, model: Shape, batch: Minibatch, device: str, rounded: float
) -> float:
    """Return the bytes of a chunk of float32 logits, its hidden states and its GEMM operands."""
    vocabulary, hidden, scored = model.vocabulary, model.hidden, batch.scored
    if config.top_k is not None and config.top_k < vocabulary // _FEW:  # no logits of all tokens
        return float(min(_KEPT_CHUNK[device], scored * (32 * config.top_k + 12 * hidden)))
    if device == "gpu":
        copy = 2.0 * vocabulary * hidden if model.autocasts else 0.0
        return copy + min(max(_GPU_CHUNK, rounded), scored * (4 * vocabulary + 10 * hidden))
    rows = most = max(16, min(_CPU_CHUNK // (4 * vocabulary), 4096))
    if not batch.several:  # chunks are of about the same size; of several rows, one may fill them
        rows = -(-scored // -(-scored // most))
    block = min(_BLOCK, 4 * vocabulary * hidden) if config.dtype != "float32" else 0
    return float(min(rows, scored) * (4 * vocabulary + 8 * hidden) + block)


def _optimizer_bytes(
    config: RunConfig, model: Shape, values: int, device: str
) -> tuple[float, float]:
    """Return the bytes of the optimizer's state, and of its update of the largest weight."""
    eight_bit, stochastic = config.optimizer == "adamw_8bit", config.rounding == "stochastic"
    half = config.weights == "bfloat16" and not model.adapter
    masters = 4.0 if half and not stochastic else 0.0
    moments = 2 * (1 + 4 / 256) if eight_bit else 8.0
    state = moments * (model.trained + values) + masters * model.trained
    if config.optimizer == "adamw_offloaded":
        state += (4 - masters) * model.trained + 4 * values
        copies = 0
    elif device == "gpu":  # fused, or compiled by torchao
        copies = 16 if eight_bit or stochastic else 0
    elif eight_bit:  # torchao searches for the codes in int64
        copies = 57 if stochastic else 53
    else:
        copies = 41 if stochastic else 8
    return state, (copies + masters) * model.largest


def _cache_bytes(config: RunConfig, model: Shape) -> float:
    """Return the bytes of keys and values, a step's logits, and autocast's copies of weights."""
    tokens = config.max_prompt_tokens + config.max_new_tokens
    sequences = config.prompts_per_step * config.group_size
    together = max(1, min(sequences, config.tokens_per_generation // tokens))
    # under autocast the norms of the keys and the rotation make the keys float32
    of_keys = 4 if model.autocasts else model.element
    pairs = model.layers * model.keys * (of_keys + model.element)
    step = model.vocabulary * (4 + 4 + 8)  # logits, probabilities, cumulative sums
    copies = 2 * (model.weights - model.embeddings) if model.autocasts else 0
    return float(together * (tokens * pairs + step) + copies)


def to_fit(
    config: RunConfig, model: Shape, *, device: str, limit: float
) -> tuple[dict[str, Any], Plan]:
    """Return the cheapest options that fit ``limit`` bytes, or all if none do."""
    changes: dict[str, Any] = {}
    best = plan(config, model, device=device)
    tokens = config.max_prompt_tokens + config.max_new_tokens
    switches: list[tuple[str, Any]] = [
        ("tokens_per_micro_batch", tokens),
        ("tokens_per_generation", 8 * tokens),
        ("loss", "linear"),
        ("gradient_checkpointing", True),
        ("mlp_tile", 2048),
        *([("offload_checkpoints", True)] if device == "gpu" else []),
        ("tokens_per_generation", tokens),
    ]
    for name, value in switches:
        if best.peak <= limit:
            break
        tried = plan(replace(config, **{name: value}), model, device=device)
        if tried.peak < best.peak:
            config, best = replace(config, **{name: value}), tried
            changes[name] = value
    return changes, best


def report(config: RunConfig) -> str:
    """Return the plan as text: the parts, the peaks, and options that fit ``config.plan`` GiB.

    Raises:
        ValueError: The model or a setting is not of a kind that can be planned.
    """
    if config.attention in ("sdpa", "eager"):
        raise ValueError(
            "plan: attention must be by_sequence, flash_attention_2 or flex_attention, since "
            f"{config.attention} takes memory by the square of a row"
        )
    if isinstance(config, GrpoConfig) and config.teacher is not None:
        raise ValueError("plan: teacher must be left out, since its memory is not counted")
    if isinstance(config, PpoConfig) and config.value_model == "separate":
        raise ValueError("plan: value_model must be shared, since a separate one is not counted")
    model, device = Shape(config), "cpu" if config.device == "cpu" else "gpu"
    tokens, limit = config.max_prompt_tokens + config.max_new_tokens, config.plan or 0.0
    lines = [
        f"{model.weights / 1e9:.2f} billion weights, {model.trained / 1e6:.1f} million trained; "
        f"sequences of {tokens} tokens",
        *_table(plan(config, model, device=device)),
    ]
    changes, best = to_fit(config, model, device=device, limit=limit * GIB)
    verdict = f"{'fits' if best.peak <= limit * GIB else 'does not fit'} {limit:g} GiB"
    if changes:
        switches = (f"--{n}" if v is True else f"--{n} {v}" for n, v in changes.items())
        return "\n".join([*lines, f"{verdict} with {' '.join(switches)}:", *_table(best)])
    return "\n".join([*lines, verdict])


def _table(found: Plan) -> list[str]:
    rows = {**found._asdict(), "generation": found.generation, "peak": found.peak}
    return [f"{name.replace('_', ' '):24}{size / GIB:10.2f} GiB" for name, size in rows.items()]
