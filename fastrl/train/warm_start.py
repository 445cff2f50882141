"""A few supervised steps, so that a new model gets its first rewards."""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from fastrl.train.config import GrpoConfig, PpoConfig, RunConfig
from fastrl.train.data.prompts import Prompt, deal
from fastrl.train.distributed import ranks
from fastrl.train.distributed.gradient_sum import GradientSum
from fastrl.train.model.loading import frozen_head
from fastrl.train.optimizers import make_optimizer
from fastrl.train.policy import batches, policy_logprobs, policy_outputs
from fastrl.train.rollout import Rollout
from fastrl.train.settings.warm_start import NEW_MODEL_STEPS


def answered(tokenizer: Any, prompts: list[Prompt], texts: list[str], device: Any) -> Rollout:
    """The texts as completions of their prompts, as if they had been sampled."""
    right = tokenizer(
        [text + tokenizer.eos_token for text in texts],
        padding=True,
        padding_side="right",
        add_special_tokens=False,
        return_tensors="pt",
    ).to(device)
    mask = right["attention_mask"].bool()
    return Rollout(
        prompts=[prompt.token_ids for prompt in prompts],
        prompt_of=torch.arange(len(prompts)),
        token_ids=right["input_ids"],
        mask=mask,
        logprobs=torch.zeros_like(mask, dtype=torch.float32),
        truncated=torch.zeros_like(mask[:, 0]),
    )


def warm_start(
    model: Any, tokenizer: Any, prompts: list[Prompt], config: GrpoConfig | PpoConfig
) -> Iterator[float]:
    """Train on demonstrations for the training prompts; yields the loss of each step.

    Each time, one of the record's ``"demonstrations"`` is chosen at random; a record without them
    has its ``"answer"``. `check_demonstrations` checks them beforehand. With ``lora_rank`` it is
    the weights below the adapter that learn.
    """
    if warm_start_steps(config) == 0:
        return
    adapted = config.lora_rank is not None
    with model.base_trained(frozen_head(model, config)) if adapted else nullcontext():
        yield from _supervised_steps(model, tokenizer, prompts, config)


def _supervised_steps(
    model: Any, tokenizer: Any, prompts: list[Prompt], config: GrpoConfig | PpoConfig
) -> Iterator[float]:
    steps = warm_start_steps(config)
    shown = [_demonstrations(prompt) for prompt in prompts]
    pairs = list(zip(prompts, shown, strict=True))
    optimizer = make_optimizer(
        model.parameters(),
        config,
        lr=config.warm_start_learning_rate,
        betas=(0.9, 0.98),
        weight_decay=0.1,
    )
    gradients = GradientSum([model])
    plain = replace(config, temperature=1.0)  # the temperature is for sampling
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.warm_start_learning_rate * min((step + 1) / 20, 1 - step / steps)
        drawn = deal(pairs, count=config.warm_start_batch, step=step, seed=config.seed)
        texts = [random.choice(demonstrations) for _, demonstrations in drawn]
        target = answered(tokenizer, [prompt for prompt, _ in drawn], texts, model.device)
        total, loss = target.mask.sum(), 0.0
        for batch in batches(target, torch.arange(len(texts)), target.mask, plain):
            logprobs = policy_logprobs(policy_outputs(model, batch, plain), batch, plain)
            part = -logprobs.sum() / total
            gradients.backward(part, batch)
            loss += 0.0 if batch.repeated else part.item()
        gradients.before_update()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield sum(ranks.together(lambda loss=loss: loss))  # type: ignore[misc]


def check_demonstrations(
    prompts: list[Prompt], tokenizer: Any, config: GrpoConfig | PpoConfig
) -> None:
    """Raise a `ValueError` that names a record whose demonstrations cannot be used."""
    known: set[str] = set()
    for prompt in prompts if warm_start_steps(config) > 0 else []:
        for text in _demonstrations(prompt):
            if text not in known:
                _check_demonstration(text, prompt, tokenizer, config)
            known.add(text)


def _check_demonstration(text: str, prompt: Prompt, tokenizer: Any, config: RunConfig) -> None:
    try:
        tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # the tokenizers package raises nothing narrower
        raise ValueError(
            f"warm_start_steps: {text!r} cannot be tokenized: {error}, in {prompt.record!r}"
        ) from error
    if config.train_file is None and tokens > config.max_new_tokens:  # never rewarded
        raise ValueError(
            f"max_new_tokens must be at least {tokens} for the task {config.task}, got "
            f"{config.max_new_tokens}"
        )


def warm_start_steps(config: RunConfig) -> int:
    """How many supervised steps come first."""
    if config.warm_start_steps is not None:
        return config.warm_start_steps
    return NEW_MODEL_STEPS[config.task] if config.model is None else 0


def _demonstrations(prompt: Prompt) -> list[str]:
    record = prompt.record
    shown = record.get("demonstrations", [record.get("answer")])
    if not isinstance(shown, list) or not shown or not all(isinstance(s, str) for s in shown):
        raise ValueError(
            f'warm_start_steps: needs "demonstrations" or "answer" as text, got {record!r}'
        )
    return shown
