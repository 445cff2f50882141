"""A few supervised steps, so that a new model earns its first rewards."""

from collections.abc import Iterator
from typing import Any

import torch

from fastrl import masked_mean, token_logprobs
from fastrl.train.config import RunConfig
from fastrl.train.prompts import Prompt, deal
from fastrl.train.rollout import Rollout, completion_logits

NEW_MODEL_STEPS = 120


def answers(model: Any, tokenizer: Any, prompts: list[Prompt]) -> Rollout:
    """The records' ``"answer"`` strings after their prompts, as if they had been sampled."""
    texts = [prompt.record["answer"] + tokenizer.eos_token for prompt in prompts]
    left = tokenizer.pad(
        {"input_ids": [prompt.token_ids for prompt in prompts]}, padding_side="left", return_tensors="pt"
    ).to(model.device)
    right = tokenizer(
        texts, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt"
    ).to(model.device)
    joined = {
        key: torch.cat([left[key], right[key]], 1) for key in ("input_ids", "attention_mask")
    }
    return Rollout(**joined, token_ids=right["input_ids"], mask=right["attention_mask"].bool())


def warm_start(model: Any, tokenizer: Any, prompts: list[Prompt], config: RunConfig) -> Iterator[float]:
    """Raise the log-likelihood of the answers to training prompts; yields the loss of each step.

    Raises:
        ValueError: A record has no ``"answer"`` string.
    """
    steps = config.warm_start_steps
    if steps is None:
        steps = NEW_MODEL_STEPS if config.model is None else 0
    if steps == 0:
        return
    for prompt in prompts:
        if not isinstance(prompt.record.get("answer"), str):
            raise ValueError(
                f'warm_start_steps: needs an "answer" string in every record, got {prompt.record!r}'
            )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warm_start_learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    for step in range(steps):
        target = answers(model, tokenizer, deal(prompts, count=config.warm_start_batch, step=step, seed=config.seed))
        logprobs = token_logprobs(completion_logits(model, target), target.token_ids, mask=target.mask)
        loss = -masked_mean(logprobs, target.mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rise.step()
        yield loss.item()
