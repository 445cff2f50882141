"""The settings of a run that decide how much memory it takes."""

from dataclasses import dataclass
from typing import Literal

from fastrl.train.settings.options import option


@dataclass
class MemorySettings:
    """What to keep, to recompute, to move and to leave out; `docs/long-sequences.md`."""

    tokens_per_micro_batch: int = option(
        16384,
        "Most tokens per forward and backward. A longer sequence is a micro-batch of its own.",
        least=1,
        result=False,
    )
    attention: Literal["by_sequence", "flash_attention_2", "flex_attention", "sdpa", "eager"] = (
        option(
            "by_sequence",
            "by_sequence: sdpa on each sequence of a packed row; others: implementations of "
            "transformers, which recognize packed rows by their positions.",
            result=False,
        )
    )
    gradient_checkpointing: bool = option(
        False, "Keep only the input of each layer, and recompute the layer.", result=False
    )
    offload_checkpoints: bool = option(
        False,
        "Move the inputs that gradient_checkpointing keeps to pinned host memory.",
        result=False,
    )
    mlp_tile: int | None = option(
        None,
        "Run and recompute the MLPs in tiles of this many tokens, and recompute the norms.",
        least=1,
        result=False,
    )
    loss: Literal["linear", "logits"] = option(
        "linear",
        "linear: from hidden states and the LM head, never materializing the logits; logits: from "
        "the model's logits, for heads that linear does not support.",
        result=False,
    )
    precision: Literal["float32", "bfloat16"] = option(
        "float32", "bfloat16: forward and backward under autocast."
    )
    weights: Literal["float32", "bfloat16"] = option("float32", "Dtype of the stored weights.")
    rounding: Literal["master", "stochastic"] = option(
        "master",
        "How bfloat16 weights take small updates: through float32 master copies (4 bytes per "
        "trained weight), or by stochastic rounding, which needs torchao.",
    )
    optimizer: Literal["adamw", "adamw_8bit", "adamw_offloaded"] = option(
        "adamw",
        "adamw_8bit: 8-bit moments, needs torchao; adamw_offloaded: moments, updates and float32 "
        "copies of the weights in host memory.",
    )
    lora_rank: int | None = option(
        None, "Train a LoRA adapter of this rank instead of the weights; needs peft.", least=1
    )
    lora_alpha: float | None = option(
        None, "The adapter is scaled by lora_alpha / lora_rank; by default 2.", above=0
    )
    lora_targets: tuple[str, ...] = option(
        ("all-linear",), "Names of the layers that get an adapter; all-linear is all but the head."
    )
    dora: bool = option(False, "Weight-decomposed LoRA (DoRA).")
    freeze_head: bool = option(False, "Do not train the embeddings and the LM head.")

    def check_weights(self) -> None:
        """Raise a `ValueError` if settings of weights and optimizer exclude one another."""
        if self.rounding == "stochastic":
            for name, allowed in (("weights", "bfloat16"), ("lora_rank", None)):
                if getattr(self, name) != allowed:
                    raise ValueError(
                        f'rounding must be "master" with {name}={getattr(self, name)}: it rounds '
                        "trained bfloat16 weights, and an adapter is float32"
                    )
            if self.optimizer == "adamw_offloaded":
                raise ValueError(
                    'rounding must be "master" with optimizer=adamw_offloaded, which keeps float32 '
                    "copies in host memory"
                )
        if self.lora_rank is None:
            for name, default in (("lora_alpha", None), ("dora", False)):
                if getattr(self, name) != default:
                    raise ValueError(f"{name} must be used with lora_rank, got lora_rank null")
            if self.lora_targets != ("all-linear",):
                raise ValueError("lora_targets must be used with lora_rank, got lora_rank null")
        if not self.lora_targets:
            raise ValueError("lora_targets must name a layer, got none")
        if "all-linear" in self.lora_targets and len(self.lora_targets) > 1:
            raise ValueError(
                f"lora_targets must be all-linear or names of layers, got {self.lora_targets}"
            )
