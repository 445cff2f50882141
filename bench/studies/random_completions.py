"""A sampler and a reward for `train_memory.py`: random tokens, whose lengths are set."""

from __future__ import annotations

from typing import Any

import torch

from fastrl import KeptTokens
from fastrl.bench.memory import Peak
from fastrl.train.rollout import Completion

#: Set before the run: the settings, the model's vocabulary, and the shortest completion.
config: Any = None
vocabulary: int = 0
shortest: int = 0
#: Resident bytes at each call of the reward, after everything was sampled.
resident: list[int] = []


def sample(prompts: list, group_size: int, complete: Any, tokenizer: Any) -> list[Completion]:
    """Return completions whose lengths are evenly spread from the shortest to the longest."""
    count, kept = len(prompts) * group_size, config.top_k
    lengths = torch.linspace(config.max_new_tokens, shortest, count).long()
    completions = []
    for length in lengths[torch.randperm(count)].tolist():
        ids = torch.randint(vocabulary, (length, 1))
        sets = (ids + torch.arange(kept or 1)) % vocabulary
        logprobs = torch.full((length,), float(kept or vocabulary)).log().neg()
        completions.append(
            Completion(
                token_ids=ids[:, 0],
                logprobs=logprobs,
                ended=True,
                kept=KeptTokens.from_lists(sets.sort(1).values.tolist()) if kept else None,
            )
        )
    return completions


def reward(prompts: list, completions: list, references: list) -> list[float]:
    """Return random rewards, and note the resident memory."""
    with Peak(torch.device("cpu")) as peak:
        pass
    resident.append(peak.before or 0)
    return torch.rand(len(completions)).tolist()
