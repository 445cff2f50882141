"""The rewards of completions: a weighted sum of functions."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.train.data.messages import prompt_text
from fastrl.train.data.prompts import Record
from fastrl.train.rewards.reward_model import RewardModel
from fastrl.train.rewards.scoring import (
    Failure,
    Outcome,
    RewardError,
    RewardFunction,
    describe,
    outcomes,
)
from fastrl.train.rewards.workers import Call, WorkerPool

_PROBED = 8  # records of a data set on which the functions are tried before a run


class Scored(NamedTuple):
    """The rewards of N completions, on the CPU."""

    total: Tensor  # float32 [N], the weighted sum
    parts: dict[str, Tensor]  # float32 [N] by the name of the function
    failed: Tensor  # bool [N], whether a function failed and ``reward_failed`` took its place

    def rows(self, index: Tensor) -> "Scored":
        """The completions at ``index``."""
        at = index.cpu()
        parts = {name: part[at] for name, part in self.parts.items()}
        return Scored(self.total[at], parts, self.failed[at])


def concatenate(scored: Sequence[Scored]) -> Scored:
    """The rewards of several lots of completions as one."""
    return Scored(
        torch.cat([each.total for each in scored]),
        {name: torch.cat([each.parts[name] for each in scored]) for name in scored[0].parts},
        torch.cat([each.failed for each in scored]),
    )


class Completions(NamedTuple):
    """N completions and what functions judge them by."""

    prompts: list[str]
    texts: list[str]
    records: list[Record]
    lengths: list[int]  # tokens


#: One of the functions of a weighted sum: for each completion its reward, or why it has none. A
#: `ValueError` says why no completion has one; its message continues the function's name.
Judge = Callable[[Completions], Sequence[Outcome]]


class Rewards:
    """A weighted sum of functions.

    It is a context manager, since it may have worker processes: they end when it is left.

    Args:
        judges: The functions by their names in the log.
        weights: The weight of each.
        quick: Names of the functions that are tried on every record before a run.
        failed: The reward that a function gets for a completion on which it fails; None: that is an
            error.
        pool: The processes that the functions are called in, if there are any.
        model: The reward model, if one of the functions is one.
    """

    def __init__(
        self,
        judges: Mapping[str, Judge],
        weights: Mapping[str, float],
        *,
        quick: Collection[str] = (),
        failed: float | None = None,
        pool: WorkerPool | None = None,
        model: RewardModel | None = None,
    ) -> None:
        self.model = model
        self._judges, self._weights = dict(judges), dict(weights)
        self._quick, self._failed, self._pool = set(quick), failed, pool

    def __enter__(self) -> "Rewards":
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End the worker processes, if there are any; another call starts them again."""
        if self._pool is not None:
            self._pool.close()

    def score(
        self, records: list[Record], completions: Sequence[str], lengths: Sequence[int]
    ) -> Scored:
        """Reward completions.

        Args:
            records: The record of each completion.
            completions: The completions, without special tokens.
            lengths: Their numbers of tokens, with the end token.

        Raises:
            RewardError: A function raised, returned a wrong number of rewards or one that is not
                finite, or took too long.
        """
        prompts = [prompt_text(record) for record in records]
        given = Completions(prompts, list(completions), records, list(lengths))
        failed = torch.zeros(len(records), dtype=torch.bool)
        total = torch.zeros(len(records), dtype=torch.float64)
        parts: dict[str, Tensor] = {}
        for name in self._judges:
            part, failures = self._outcomes(name, given)
            failed[list(failures)] = True
            total += self._weights[name] * part
            parts[name] = part.float()
        if not total.float().isfinite().all():
            raise RewardError("reward: the weighted sum must be finite in float32")
        return Scored(total.float(), parts, failed)

    def means(
        self, scored: Scored, *, failures: int | None = None, held_out: bool = False
    ) -> dict[str, float]:
        """The means of rewards, as the log names them.

        Args:
            scored: The rewards.
            failures: The number of failures to log, if they are not only those of ``scored``.
            held_out: Whether the completions are those of held-out prompts.

        Returns:
            ``reward``; with several functions, ``reward/NAME`` of each; and if failures are not
            errors, ``reward_failures``, the number of completions on which a function failed. Of
            held-out prompts all begin with ``held_out_``.
        """
        prefix = "held_out_reward" if held_out else "reward"
        row = {prefix: float(scored.total.double().mean())}
        if len(scored.parts) > 1:
            for name, part in scored.parts.items():
                row[f"{prefix}/{name}"] = float(part.double().mean())
        if self._failed is not None:
            row[f"{prefix}_failures"] = float(scored.failed.sum() if failures is None else failures)
        return row

    def probe(self, records: list[Record]) -> None:
        """Try the functions on empty completions: of a few records, the quick ones of all.

        Raises:
            RewardError: A function raises or returns no numbers, or fails: without ``failed`` on
                one completion, else on all.
        """
        few = records[:: -(-len(records) // _PROBED)]
        for some, quick in ((records, True), (few, False)):
            names = [name for name in self._judges if (name in self._quick) == quick]
            prompts = [prompt_text(record) for record in some]
            empty = Completions(prompts, [""] * len(some), some, [1] * len(some))
            for name in names:
                failures = self._outcomes(name, empty)[1]
                if len(failures) == len(some):
                    raise RewardError(failures[0])

    def _outcomes(self, name: str, given: Completions) -> tuple[Tensor, dict[int, str]]:
        """The rewards of a function, float64 [N], and sentences for those on which it failed."""
        try:
            judged = self._judges[name](given)
        except ValueError as error:
            raise RewardError(f"reward {name}: {error}") from error
        rewards = torch.empty(len(judged), dtype=torch.float64)
        failures: dict[int, str] = {}
        for i, outcome in enumerate(judged):
            if not isinstance(outcome, Failure):
                rewards[i] = outcome
                continue
            failures[i] = describe(name, outcome, given.prompts[i], given.texts[i])
            if self._failed is None:
                raise RewardError(failures[i])
            rewards[i] = self._failed
        return rewards, failures


def in_this_process(function: RewardFunction) -> Judge:
    """Call ``function`` once with all completions."""

    def judge(given: Completions) -> list[Outcome]:
        return outcomes(function, given.prompts, given.texts, given.records)

    return judge


def in_workers(function: str, pool: WorkerPool) -> Judge:
    """Call ``"module:function"`` in processes of their own, with one completion at a time."""

    def judge(given: Completions) -> list[Outcome]:
        rows = zip(given.prompts, given.texts, given.records, strict=True)
        return pool.outcomes([Call(function, *row) for row in rows])

    return judge
