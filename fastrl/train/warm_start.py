"""A few supervised steps, so that a model earns its first rewards."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastrl.train.config import RunConfig
from fastrl.train.endings import Endings
from fastrl.train.optimizers import make_optimizer
from fastrl.train.policy import batches, policy_logprobs, policy_outputs
from fastrl.train.prompts import Prompt, deal
from fastrl.train.rollout import Completion, Rollout, rollout_of

#: Steps for the small new model, and prompts per step, by the embedded task.
_OF_TASK = {"arithmetic": (700, 64), "long_addition": (1600, 8)}
_PROMPTS = 16  # per step, of prompts of your own
_RATE = 3e-3  # of the small new model
_FASTER = 5  # than the run, for other models
_OF_ADAPTERS = 10  # an adapter's learning rate is this multiple of what its model would have


def warm_start_steps(config: RunConfig) -> int:
    """Return the number of supervised steps at the start."""
    if config.warm_start_steps is not None:
        return config.warm_start_steps
    return 0 if config.model else _OF_TASK.get(config.prompts[0], (0, 0))[0]


def warm_start_prompts(config: RunConfig) -> int:
    """Return the number of prompts of a supervised step."""
    return _OF_TASK.get(config.prompts[0], (0, _PROMPTS))[1]


def check_warm_start(prompts: list[Prompt], tokenizer: Any, config: RunConfig) -> None:
    """Raise a `ValueError` if a demonstration is missing, or is too long to be sampled."""
    if not warm_start_steps(config):
        return
    drawn = [prompt for some in _dealt(prompts, config) for prompt in some]
    for prompt in drawn:
        shown = _demonstrations(prompt)
        if not shown or not all(text and isinstance(text, str) for text in shown):
            raise ValueError(
                "warm_start_steps must be 0 unless every record has a text in its answer or its "
                f"demonstrations, got {shown} for {prompt.text[:80]!r}"
            )
    texts = sorted({text for prompt in drawn for text in _demonstrations(prompt)})
    longest = max(len(ids) + 1 for ids in _token_ids(tokenizer, texts))
    if longest > config.max_new_tokens:  # never rewarded
        raise ValueError(
            f"max_new_tokens must be at least {longest}, which the longest demonstration of "
            f"warm_start_steps has, got {config.max_new_tokens}"
        )


def warm_start(
    model: Any, tokenizer: Any, prompts: list[Prompt], config: RunConfig
) -> Iterator[float]:
    """Train on the demonstrations of training prompts; yield the loss of each step.

    A record's demonstrations are its `demonstrations`, or else its `answer`. With ``lora_rank`` the
    weights below the adapter learn, not the adapter.
    """
    steps = warm_start_steps(config)
    if not steps:
        return
    adapted = config.lora_rank is not None
    of_run = config.peak_learning_rate / (_OF_ADAPTERS if adapted else 1)
    rate = _FASTER * of_run if config.model else _RATE
    ends = Endings(model, tokenizer, config).token_ids
    with model.base_trained(frozen_head(model, config)) if adapted else nullcontext():
        optimizer = make_optimizer(
            model.parameters(), config, lr=rate, betas=(0.9, 0.98), weight_decay=0.1
        )
        plain = replace(config, temperature=1.0)  # the temperature is for sampling
        rise = min(20, 1 + steps // 4)
        for step, drawn in enumerate(_dealt(prompts, config)):
            for group in optimizer.param_groups:
                group["lr"] = rate * min((step + 1) / rise, 1 - step / steps)
            target = demonstrated(tokenizer, drawn, ends, model.device)
            total, loss = target.mask.sum(), 0.0
            for batch in batches(target, torch.arange(len(target.mask)), target.mask, plain):
                logprobs = policy_logprobs(policy_outputs(model, batch, plain), batch, plain)
                part = -logprobs.sum() / total
                part.backward()
                loss += part.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield loss


def _dealt(prompts: list[Prompt], config: RunConfig) -> Iterator[list[Prompt]]:
    """Yield the prompts of each supervised step."""
    count = warm_start_prompts(config)
    for step in range(warm_start_steps(config)):
        yield deal(prompts, count=count, step=step, seed=config.seed)


def _demonstrations(prompt: Prompt) -> list[Any]:
    shown = prompt.record.get("demonstrations", [prompt.record.get("answer")])
    return shown if isinstance(shown, list) else [shown]


def _token_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def frozen_head(model: Any, config: RunConfig) -> list[nn.Parameter]:
    """Return the weights of the embeddings and of the LM head if ``freeze_head`` is on."""
    if not config.freeze_head:
        return []
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [parameter for layer in ends for parameter in layer.parameters()]


def demonstrated(tokenizer: Any, prompts: list[Prompt], ends: list[int], device: Any) -> Rollout:
    """Return the demonstrations as completions of their prompts, as if they had been sampled."""
    shown = [_demonstrations(prompt) for prompt in prompts]
    texts = [text for some in shown for text in some]
    of_text = [prompt for prompt, some in zip(prompts, shown, strict=True) for _ in some]
    completions = [
        Completion(
            torch.tensor([*own, _end(tokenizer, prompt, ends)]), torch.zeros(len(own) + 1), True
        )
        for prompt, own in zip(of_text, _token_ids(tokenizer, texts), strict=True)
    ]
    return rollout_of(prompts, completions, device, list(map(len, shown)))


def _end(tokenizer: Any, prompt: Prompt, ends: list[int]) -> int:
    """Return the end of a turn in the chat template, or of a text."""
    behind = [*_token_ids(tokenizer, [prompt.turn_end])[0], tokenizer.eos_token_id, *ends]
    return next(int(token) for token in behind if token in ends)
