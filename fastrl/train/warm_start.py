"""A few supervised steps, so that a new model earns its first rewards."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastrl.train.config import RunConfig
from fastrl.train.optimizers import make_optimizer
from fastrl.train.policy import batches, policy_logprobs, policy_outputs
from fastrl.train.prompts import TASKS, Prompt, deal
from fastrl.train.rollout import Completion, Rollout, rollout_of

#: Steps for the small new model, and prompts per step, by the embedded task.
_OF_TASK = {"arithmetic": (700, 64), "long_addition": (1600, 8)}
_RATE = 3e-3


def warm_start_steps(config: RunConfig) -> int:
    """Return the number of supervised steps at the start."""
    if config.warm_start_steps is not None:
        return config.warm_start_steps
    return _OF_TASK[config.prompts[0]][0] if _is_new(config) else 0


def check_warm_start(prompts: list[Prompt], tokenizer: Any, config: RunConfig) -> None:
    """Raise a `ValueError` if there are no demonstrations, or one is too long to be sampled."""
    if not warm_start_steps(config):
        return
    if config.prompts[0] not in TASKS:
        raise ValueError(
            "warm_start_steps must be 0 with prompts of your own, which have no demonstrations"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError("warm_start_steps must be 0 with a tokenizer that has no end token")
    shown = {text for prompt in prompts for text in prompt.record["demonstrations"]}
    longest = max(len(tokenizer(text)["input_ids"]) for text in shown) + 1
    if longest > config.max_new_tokens:  # never rewarded
        raise ValueError(
            f"max_new_tokens must be at least {longest} for the task {config.prompts[0]}, got "
            f"{config.max_new_tokens}"
        )


def warm_start(
    model: Any, tokenizer: Any, prompts: list[Prompt], config: RunConfig
) -> Iterator[float]:
    """Train on the demonstrations of training prompts; yield the loss of each step.

    With ``lora_rank`` the weights below the adapter learn, not the adapter.
    """
    steps = warm_start_steps(config)
    if not steps:
        return
    adapted = config.lora_rank is not None
    with model.base_trained(frozen_head(model, config)) if adapted else nullcontext():
        optimizer = make_optimizer(
            model.parameters(), config, lr=_RATE, betas=(0.9, 0.98), weight_decay=0.1
        )
        plain = replace(config, temperature=1.0)  # the temperature is for sampling
        _, count = _OF_TASK[config.prompts[0]]
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = _RATE * min((step + 1) / 20, 1 - step / steps)
            drawn = deal(prompts, count=count, step=step, seed=config.seed)
            texts = [text for prompt in drawn for text in prompt.record["demonstrations"]]
            target = demonstrated(tokenizer, drawn, texts, model.device)
            total, loss = target.mask.sum(), 0.0
            for batch in batches(target, torch.arange(len(texts)), target.mask, plain):
                logprobs = policy_logprobs(policy_outputs(model, batch, plain), batch, plain)
                part = -logprobs.sum() / total
                part.backward()
                loss += part.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield loss


def frozen_head(model: Any, config: RunConfig) -> list[nn.Parameter]:
    """Return the weights of the embeddings and of the LM head if ``freeze_head`` is on."""
    if not config.freeze_head:
        return []
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [parameter for layer in ends for parameter in layer.parameters()]


def demonstrated(tokenizer: Any, prompts: list[Prompt], texts: list[str], device: Any) -> Rollout:
    """Return texts as completions of their prompts, as if they had been sampled."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    completions = [
        Completion(torch.tensor([*own, tokenizer.eos_token_id]), torch.zeros(len(own) + 1), True)
        for own in ids
    ]
    return rollout_of(prompts, completions, device)


def _is_new(config: RunConfig) -> bool:
    return config.model is None and config.prompts[0] in _OF_TASK
