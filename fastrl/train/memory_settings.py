"""The settings of a run that decide how much memory it takes."""

from dataclasses import dataclass
from typing import Literal

from fastrl.train.options import option


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
        "Run and recompute the MLPs in tiles of this many tokens.",
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
        "trained weight), or by stochastic rounding.",
    )
    optimizer: Literal["adamw", "adamw_8bit", "adamw_offloaded"] = option(
        "adamw",
        "adamw_8bit: 8-bit moments; adamw_offloaded: moments and updates in host memory. "
        "Both need torchao.",
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
