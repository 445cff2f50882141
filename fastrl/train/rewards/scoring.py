"""Calling a reward function: import by name, checks of what it returns."""

import importlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fastrl.train.data.prompts import Record
from fastrl.train.run.terminal import printable


class RewardError(ValueError):
    """A reward function raised, or returned invalid rewards."""


RewardFunction = Callable[[list[str], list[str], list[Record]], Sequence[float]]


def import_reward(path: str) -> RewardFunction:
    """The function ``module:function``.

    Raises:
        ValueError: The module cannot be imported, or has no such function.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"reward: importing {module_name} raised {type(error).__name__}: "
            f"{printable(str(error))}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward: {module_name} has no function {name!r}")  # noqa: TRY004
    return function  # type: ignore[no-any-return]


def score(function: RewardFunction, records: list[Record], completions: list[str]) -> Tensor:
    """Call ``function`` on completions and their records.

    Returns:
        The rewards, float32 [N].

    Raises:
        RewardError: The function raised, or returned a wrong number of rewards or one that is not
            finite.
    """
    prompts = [record["prompt"] for record in records]
    try:
        returned = function(prompts, list(completions), records)
        unordered = isinstance(returned, (str, bytes, Mapping))
        values = [] if unordered else [float(value) for value in returned]
    except Exception as error:  # a user's function may raise anything
        said = printable(str(error))  # it may quote a completion
        raise RewardError(f"reward: raised {type(error).__name__}: {said}") from error
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
