"""Supervised steps before a new reward model learns to rank.

A reward model starts from a language model that was fine-tuned on good completions (Ouyang et al.
2022, https://arxiv.org/abs/2203.02155, section 3.5). A new model becomes one here: its layers learn
to predict the chosen completions, below a head that is then dropped.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fastrl.train.config import RewardModelConfig
from fastrl.train.data.pairs import Pair
from fastrl.train.data.prompts import deal
from fastrl.train.gradients import autocast
from fastrl.train.model.sequence_scorer import padded
from fastrl.train.optimizers import make_optimizer
from fastrl.train.padding import by_length

NEW_MODEL_STEPS = 600


def scorer_warm_start(model: Any, pairs: list[Pair], config: RewardModelConfig) -> Iterator[float]:
    """Train the layers on the chosen completions of the pairs; yields the loss of each step."""
    steps = scorer_warm_start_steps(config)
    if steps == 0:
        return
    embeddings = model.get_input_embeddings().weight
    head = nn.Linear(embeddings.shape[1], embeddings.shape[0], bias=False).to(embeddings)
    nn.init.normal_(head.weight, std=model.config.initializer_range)
    optimizer = make_optimizer(
        [*model.base_model.parameters(), *head.parameters()],
        config,
        lr=config.warm_start_learning_rate,
        betas=(0.9, 0.98),
        weight_decay=0.1,
    )
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.warm_start_learning_rate * min((step + 1) / 20, 1 - step / steps)
        drawn = deal(pairs, count=config.warm_start_batch, step=step, seed=config.seed)
        total = sum(len(pair.chosen) - pair.prompt_tokens for pair in drawn)
        loss = 0.0
        for batch in by_length([len(pair.chosen) for pair in drawn], config.tokens_per_micro_batch):
            with autocast(config, model.device):
                part = _loss(model, head, [drawn[i] for i in batch]) / total
            part.backward()
            loss += part.item()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def scorer_warm_start_steps(config: RewardModelConfig) -> int:
    """How many supervised steps come first."""
    if config.model is not None:
        return 0
    return NEW_MODEL_STEPS if config.warm_start_steps is None else config.warm_start_steps


def _loss(model: Any, head: nn.Module, pairs: list[Pair]) -> Tensor:
    """Minus the log-probabilities of the tokens of the chosen completions, summed."""
    ids, mask = padded([pair.chosen for pair in pairs], model.config.pad_token_id, model.device)
    states = model.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    places = torch.arange(1, ids.shape[1], device=ids.device)
    begin = torch.tensor([pair.prompt_tokens for pair in pairs], device=ids.device)[:, None]
    scored = (places >= begin) & mask[:, 1:].bool()
    return cross_entropy(head(states[:, :-1][scored]), ids[:, 1:][scored], reduction="sum")
