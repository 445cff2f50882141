"""Rewards: found by name, called on strings, and checked before they are believed."""

import importlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fastrl.train.prompts import Record


class RewardError(ValueError):
    """A reward function that raised, or returned what cannot be trained on."""


RewardFunction = Callable[[list[str], list[str], list[Record]], Sequence[float]]


def exact_match(prompts: list[str], completions: list[str], records: list[Record]) -> list[float]:
    """1 where the completion is the record's ``"answer"`` but for space around it, else 0."""
    for prompt, record in zip(prompts, records, strict=True):
        if not isinstance(record.get("answer"), str):
            raise ValueError(  # noqa: TRY004
                f'"answer" must be a string, got {record.get("answer")!r} beside prompt {prompt!r}'
            )
    return [
        float(completion.strip() == record["answer"].strip())
        for completion, record in zip(completions, records, strict=True)
    ]


def import_reward(path: str) -> RewardFunction:
    """The function at ``module:function``.

    Raises:
        ValueError: The module cannot be imported, or holds no such function.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises on import
        raise ValueError(
            f"reward: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward: {module_name} has no function {name!r}")  # noqa: TRY004
    return function  # type: ignore[no-any-return]


def score(function: RewardFunction, records: list[Record], completions: list[str]) -> Tensor:
    """Call ``function`` on completions and the records that they answer.

    Returns:
        The rewards, float32 [N].

    Raises:
        RewardError: The function raised, or returned the wrong count or no finite numbers.
    """
    prompts = [record["prompt"] for record in records]
    try:
        returned = function(prompts, list(completions), records)
        unordered = isinstance(returned, (str, bytes, Mapping))
        values = [] if unordered else [float(value) for value in returned]
    except Exception as error:  # whatever a user's function raises
        raise RewardError(f"reward: raised {type(error).__name__}: {error}") from error
    if unordered:
        kind = type(returned).__name__
        raise RewardError(f"reward: must return a sequence of numbers, got {kind}")
    if len(values) != len(completions):
        raise RewardError(f"reward: must return {len(completions)} numbers, got {len(values)}")
    rewards = torch.tensor(values, dtype=torch.float64).float()
    for i in (~rewards.isfinite()).nonzero().flatten().tolist():
        raise RewardError(
            f"reward: must be finite in float32, got {values[i]} for "
            f"{prompts[i]!r} -> {completions[i]!r}"
        )
    return rewards
