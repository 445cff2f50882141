"""A model's sizes, from its configuration, and its activations, from a dry run."""

import weakref
from collections import Counter
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from fastrl.integrations.transformers import backbone
from fastrl.integrations.transformers.by_sequence import BY_SEQUENCE, Span, make_layout
from fastrl.train.config import RunConfig
from fastrl.train.loading import (
    character_tokenizer,
    model_path,
    pretrained_config,
    reason,
    small_model,
)
from fastrl.train.recomputation import checkpoint_layers, tile_mlps, without_dropout


class Shape:
    """The sizes of the model that the settings name, in elements; its weights are not loaded.

    Raises:
        ValueError: There is no such model, or its layers are of another kind.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        #: bytes of a weight, and of an output of the linear layers
        self.wide = 4 if config.dtype == "float32" else 2
        self.element = 4 if config.dtype == config.precision == "float32" else 2
        self.autocasts = self.element < self.wide
        if config.model is None:
            self._of_model: Any = small_model(character_tokenizer()).config
        try:
            if config.model is not None:
                self._of_model = pretrained_config(model_path(config.model))
            model = self._without_adapter(self._of_model)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"model must be a causal LM with a configuration, got {config.model!r}: "
                f"{reason(error, str(config.model))}"
            ) from error
        sizes = self._of_model
        needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        missing = [name for name in needed if not isinstance(getattr(sizes, name, None), int)]
        if missing or any("experts" in name for name, _ in model.named_modules()):
            raise ValueError(
                f"plan: model must have layers of attention and an MLP, got {sizes.model_type} "
                f"{'without ' + ', '.join(missing) if missing else 'with experts'}"
            )
        self.hidden, self.layers = int(sizes.hidden_size), int(sizes.num_hidden_layers)
        #: the kind of each layer, if sliding and full attention alternate
        self.kinds = tuple(getattr(sizes, "layer_types", None) or [None] * self.layers)
        width = getattr(sizes, "head_dim", None) or self.hidden // sizes.num_attention_heads
        heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
        self.keys = heads * width
        ends = {model.get_output_embeddings().weight, model.get_input_embeddings().weight}
        self.vocabulary, self.tied = len(model.get_output_embeddings().weight), len(ends) == 1
        weights = set(model.parameters())
        self.weights = sum(p.numel() for p in weights)
        self.embeddings = sum(p.numel() for p in ends)
        #: the matrices of the layers, which nf4 stores in 4 bits
        self.matrices = [p.numel() for p in weights - ends if p.dim() == 2]
        trained = [p.numel() for p in set(self._adapted(model).parameters()) if p.requires_grad]
        self.trained, self.largest = sum(trained), max(trained)  # all, and the largest parameter
        self.adapter = 0 if config.lora_rank is None else self.trained

    def built(self, kinds: tuple[str | None, ...]) -> Any:
        """Return the model with layers of these kinds, and its adapter, on the device "meta"."""
        sizes = deepcopy(self._of_model)
        sizes.num_hidden_layers = len(kinds)
        if getattr(sizes, "layer_types", None):
            sizes.layer_types = list(kinds)
        return self._adapted(self._without_adapter(sizes))

    def _without_adapter(self, sizes: Any) -> Any:
        dtype = torch.float32 if self.wide == 4 else torch.bfloat16
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(sizes, dtype=dtype)
        if sizes.tie_word_embeddings:
            model.tie_weights()
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            end.requires_grad_(not self._config.freeze_head)
        return model

    def _adapted(self, model: Any) -> Any:
        if self._config.lora_rank is None:
            return model
        from fastrl.train import adapters

        with torch.device("meta"):
            return adapters.attach(model, self._config, "base")


class Sequences(NamedTuple):
    """Completions in a row and the prompt that they share, as `packing` puts them there."""

    prompt: int  # tokens
    new: int  # tokens of each completion that are in the row
    completions: int

    @property
    def tokens(self) -> int:
        """The tokens of all."""
        return self.prompt + self.completions * self.new

    def spans(self, row: int) -> list[Span]:
        """Return the spans of a row of ``row`` tokens, of such sequences or of shorter ones."""
        share = min(1.0, row / self.tokens)
        prompt, new = int(share * self.prompt), max(1, int(share * self.new))
        if self.completions == 1:
            ends = [(0, prompt + new, 0)]
        else:
            ends = [(0, prompt, 0)]
            ends += [
                (prompt + i * new, prompt + (i + 1) * new, prompt) for i in range(self.completions)
            ]
        return [
            Span(at + first, min(at + end, row), (at, at + prefix) if prefix else (0, 0))
            for at in range(0, row, ends[-1][1])
            for first, end, prefix in ends
            if first < end and at + first < row
        ]


class Activations(NamedTuple):
    """Bytes of activations of all layers."""

    kept: float  # kept by the forward for the layers
    states: float  # kept for the rest: the last norm, the last hidden states
    forward: float  # peak of the forward, beyond the kept bytes
    backward: float  # peak of the backward, beyond the kept bytes


Settings = tuple[str, bool, int | None]  # precision, gradient_checkpointing, mlp_tile


@lru_cache(maxsize=64)
def activations(model: Shape, settings: Settings, sequences: Sequences, row: int) -> Activations:
    """Return the bytes for a row of ``row`` tokens.

    A dry run has one layer, and another of each kind. A long row is extrapolated, since bytes are
    linear in its tokens.
    """
    short = max(4096, 2 * (settings[2] or 0))
    if row > 2 * short:
        ends = [activations(model, settings, sequences, n) for n in (short, 2 * short)]
        further = (row - 2 * short) / short
        return Activations._make(b + (b - a) * further for a, b in zip(*ends, strict=True))
    first, spans = model.kinds[:1], sequences.spans(row)
    alone = _dry_run(model.built(first), settings, spans)
    kept, forward, backward = 0, alone[1], alone[2]
    counts, layer = Counter(model.kinds), {}
    for kind, count in counts.items():
        both = _dry_run(model.built((*first, kind)), settings, spans)
        layer[kind] = both[0] - alone[0]
        kept += count * layer[kind]
        forward += (count - (kind == first[0])) * (both[1] - alone[1])
        backward = max(backward, both[2])
    return Activations(kept, alone[0] - layer[first[0]], forward, backward)


def _dry_run(model: Any, settings: Settings, spans: list[Span]) -> tuple[int, int, int]:
    """Return the bytes that the forward keeps, and the peaks of forward and backward above them."""
    (precision, checkpoints, tile), row = settings, spans[-1].end
    without_dropout(model)
    if tile is not None:
        tile_mlps(model, tile)
    model.set_attn_implementation(BY_SEQUENCE)
    if checkpoints:
        checkpoint_layers(model)
    layout = make_layout(spans, torch.device("cpu"))
    # nothing is computed; the CPU's tensors know autocast, unlike "meta"
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({n: _fake(t) for n, t in tensors.items() if t is not None})
        ids, positions = torch.zeros(1, row, dtype=torch.long), torch.arange(row)[None]
        with _Memory(model) as memory:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                states = backbone(model)(
                    input_ids=ids, position_ids=positions, use_cache=False, sequences=layout
                ).last_hidden_state[0, positions[0]]
            kept, forward, memory.peak = memory.live, memory.peak, 0
            states.backward(torch.empty_like(states))
    return kept, forward - kept, memory.peak - kept


def _fake(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of that shape; a parameter drops its gradient, which the plan counts."""
    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        moved = nn.Parameter(moved, tensor.requires_grad)
        if moved.requires_grad:
            moved.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return moved


class _Memory(TorchDispatchMode):
    """A count of the bytes of the storages that operations allocate, while these exist."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, Any] = {}
        self.live = self.peak = 0
        for tensor in (*model.parameters(), *model.buffers()):
            self._add(tensor.untyped_storage())
        self.live = self.peak = 0  # from here on, beyond the weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        known, size = self._known.get(storage._cdata), storage.nbytes()
        if known is None or known() is not storage:
            self._known[storage._cdata] = weakref.ref(storage, lambda _: self._add_bytes(-size))
            self._add_bytes(size)

    def _add_bytes(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)
