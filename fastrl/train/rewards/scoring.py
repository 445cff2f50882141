"""Calling a reward function: import by name, checks of what it returns."""

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastrl.train.data.prompts import Record
from fastrl.train.run.terminal import printable

_QUOTED = 300  # characters of a text in a message


class RewardError(ValueError):
    """A reward function raised, or returned invalid rewards."""


class Failure(NamedTuple):
    """Why a function has no reward for a completion."""

    reason: str  # what follows the function's name in a sentence


#: What a function returns for a completion.
Outcome = float | Failure
RewardFunction = Callable[[list[str], list[str], list[Record]], Sequence[float | Failure]]


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


def outcomes(
    function: RewardFunction, prompts: list[str], completions: list[str], records: list[Record]
) -> list[Outcome]:
    """Call ``function`` on completions, each with its prompt and its record.

    Returns:
        For each completion its reward, finite in float32, or why it has none.

    Raises:
        RewardError: The function raised, or did not return as many numbers as there are
            completions. The message continues the function's name.
    """
    try:
        # copies: what a function changes must not reach the samples or another function
        returned = function(list(prompts), list(completions), copy.deepcopy(records))
        unordered = isinstance(returned, (str, bytes, Mapping))
        values = [] if unordered else list(returned)
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        said = printable(str(error))  # it may quote a completion
        raise RewardError(f"raised {type(error).__name__}: {said}") from error
    if unordered:
        raise RewardError(f"must return a sequence of numbers, got {type(returned).__name__}")
    if len(values) != len(completions):
        raise RewardError(f"must return {len(completions)} numbers, got {len(values)}")
    return [_outcome(value) for value in values]


def describe(name: str, failure: Failure, prompt: str, completion: str) -> str:
    """A sentence that names the function, the prompt and the completion."""
    return f"reward {name}: {failure.reason}, for {_quoted(prompt)} -> {_quoted(completion)}"


def _outcome(value: Any) -> Outcome:
    if isinstance(value, Failure):
        return value
    try:
        number = float(value)
    except Exception as error:  # of a user's type
        return Failure(f"must return numbers, got {value!r} ({type(error).__name__}: {error})")
    if not torch.tensor(number, dtype=torch.float64).float().isfinite():
        return Failure(f"must be finite in float32, got {number}")
    return number


def _quoted(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _QUOTED else f"{shown[:_QUOTED]}... ({len(text)} characters)"
