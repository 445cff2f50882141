"""Rewards of a batch whose completions the ranks share."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastrl.train.data.prompts import Record
from fastrl.train.distributed import ranks
from fastrl.train.run import checkpoint

Rewards = TypeVar("Rewards")


def in_shares(
    score: Callable[[Any, list[Record], list[str]], Rewards],
    reward: Any,
    records: list[Record],
    completions: list[str],
    group_size: int = 1,
) -> Rewards:
    """``score(reward, records, completions)``, each rank for a share of whole groups.

    The generators are those of the first rank afterwards, on all ranks: a reward function may use
    random numbers.

    Returns:
        The rewards of all completions, on all ranks: what ``score`` returns, a tensor or a list
        with a value per completion, or a tuple or dict of these.

    Raises:
        RewardError: On all ranks, if the function fails on one.
    """
    if ranks.count() == 1:
        return score(reward, records, completions)
    groups = len(records) // group_size
    own = slice(
        groups * ranks.index() // ranks.count() * group_size,
        groups * (ranks.index() + 1) // ranks.count() * group_size,
    )
    parts = ranks.together(
        lambda: score(reward, records[own], completions[own]) if records[own] else None
    )
    checkpoint.set_rng_state(ranks.from_first(checkpoint.rng_state))
    return _joined([part for part in parts if part is not None])  # type: ignore[no-any-return]


def _joined(parts: list[Any]) -> Any:
    """The values of all shares in one structure."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, list):
        return [value for part in parts for value in part]
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        each = [_joined(list(values)) for values in zip(*parts, strict=True)]
        return type(first)(*each) if hasattr(first, "_fields") else tuple(each)
    raise TypeError(f"rewards of several ranks cannot be joined, got {type(first).__name__}")
