"""Sampling completions, by one of several engines behind one interface."""

from typing import Any

from fastrl.train.config import RunConfig
from fastrl.train.sampling.continuous_sampler import ContinuousSampler
from fastrl.train.sampling.correction import rollout_correction
from fastrl.train.sampling.sampler import Sampler, TokenCount
from fastrl.train.sampling.transformers_sampler import TransformersSampler
from fastrl.train.sampling.vllm_sampler import VllmSampler

__all__ = ["Sampler", "TokenCount", "make_sampler", "rollout_correction"]


def make_sampler(model: Any, tokenizer: Any, config: RunConfig) -> Sampler:
    """The engine that ``config.sampler`` names, for this model.

    Args:
        model: A causal LM of `fastrl.train.model.loading`, or one that PEFT wraps.
        tokenizer: The model's.
        config: The settings of the run.

    Raises:
        ValueError: A setting does not fit the model, its tokenizer or the engine, or the engine is
            not installed.
    """
    if config.sampler == "continuous":
        return ContinuousSampler(model, tokenizer, config)
    if config.sampler == "vllm":
        return VllmSampler(model, tokenizer, config)
    return TransformersSampler(model, tokenizer, config)
