r"""Ready reward functions that match completions with regular expressions.

The expressions are those of the package regex, whose matching can be given a time limit: a pattern
such as ``(a|a)*b`` may backtrack for longer than a run lasts.
"""

from collections.abc import Sequence
from typing import Any

import regex

from fastrl.train.data.prompts import Record
from fastrl.train.rewards.scoring import Failure, Outcome

#: Seconds for a completion, if no other limit is given.
SECONDS = 10.0


def regular_expression(
    prompts: Sequence[str],
    completions: Sequence[str],
    records: Sequence[Record],
    *,
    pattern: str | None = None,
    seconds: float = SECONDS,
) -> list[Outcome]:
    """1 if the record's ``"pattern"`` is found in the completion, else 0.

    ``^`` and ``$`` anchor it to the beginning and the end of the completion.

    Args:
        prompts: The prompts.
        completions: The completions.
        records: Their records.
        pattern: The pattern for records without one.
        seconds: Time limit for a completion.

    Returns:
        For each completion its reward, or a `Failure` if that took too long.

    Raises:
        ValueError: A record has no pattern, or one that is not a regular expression.
    """
    rewards = []
    for prompt, completion, record in zip(prompts, completions, records, strict=True):
        found = record.get("pattern", pattern)
        if found is None:
            raise ValueError(f'"pattern" or reward_pattern must be given, for prompt {prompt!r}')
        compiled = compiled_pattern(found, f'"pattern" of prompt {prompt!r}')
        rewards.append(_matches(compiled.search, completion, seconds))
    return rewards


def has_format(
    completions: Sequence[str], *, pattern: str, seconds: float = SECONDS
) -> list[Outcome]:
    """1 if the whole completion, without surrounding space, matches ``pattern``, else 0.

    A dot in the pattern also stands for a line break.

    Raises:
        ValueError: ``pattern`` is not a regular expression.
    """
    whole = compiled_pattern(pattern, "reward_format", regex.DOTALL).fullmatch
    return [_matches(whole, completion.strip(), seconds) for completion in completions]


def compiled_pattern(pattern: Any, where: str, flags: int = 0) -> Any:
    """The compiled pattern; ``regex`` keeps those that were compiled before.

    Raises:
        ValueError: It is not a regular expression; the message names ``where``.
    """
    if not isinstance(pattern, str):
        raise ValueError(f"{where} must be a string, got {pattern!r}")  # noqa: TRY004
    try:
        return regex.compile(pattern, flags)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{where} must be a regular expression, got {pattern!r}: {error}"
        ) from error


def _matches(match: Any, text: str, seconds: float) -> Outcome:
    try:
        return float(match(text, timeout=seconds) is not None)
    except TimeoutError:
        return Failure(f"took longer than {seconds:g} s to match its pattern")
