"""The settings of a run that decide how completions are sampled and which tokens count."""

from dataclasses import dataclass
from typing import Literal

from fastrl.train.settings.options import option


@dataclass
class SamplingSettings:
    """How the completions are sampled."""

    max_new_tokens: int = option(
        4, "Longest completion, including its end token.", least=1, by_task={"long_addition": 192}
    )
    temperature: float = option(
        1.0,
        "Temperature of the sampling and of the loss.",
        above=0,
        by_task={"long_addition": 0.6},
    )
    stop_strings: tuple[str, ...] = option(
        (), "A completion ends with the token that completes one of these strings."
    )
    end_tokens: tuple[str, ...] = option(
        (), "Tokens that end a completion besides those of the model, such as <|im_end|>."
    )
    truncated: Literal["count", "mask"] = option(
        "count", "mask: completions without an end before max_new_tokens have no loss."
    )
    sampler: Literal["transformers", "continuous", "vllm"] = option(
        "transformers",
        "transformers: generate; continuous: its continuous batching; vllm: vLLM in this process.",
    )
    tokens_per_generation: int = option(
        65536,
        "Most tokens of sequences that are generated together, which bounds the cache.",
        least=1,
        result=False,
    )
    rollout_correction: Literal["auto", "none", "truncate", "mask"] = option(
        "auto",
        "Importance weights between sampler and trainer, truncated or masked above 2; auto: "
        "truncate where their log-probabilities can differ (bfloat16, another sampler).",
    )
