"""Rewards: a weighted sum of built-in and user-defined functions of the completions."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fastrl.train import math_answers, reward_calls
from fastrl.train.config import RunConfig
from fastrl.train.math_answers import math_equality as math_equality
from fastrl.train.prompts import Prompt, Record
from fastrl.train.reward_calls import Failure, RewardError, Source
from fastrl.train.reward_model import RewardModel
from fastrl.train.reward_workers import Workers, source_of
from fastrl.train.sampling import import_function

#: The function that judges completions of an embedded task if nothing is rewarded.
_CHECKS = {
    "arithmetic": ("exact_match",),
    "long_addition": ("fastrl.train.long_addition:right_sum",),
}
_PROBED = 8  # records on which a run tries the functions before it starts
_SECONDS = 5.0  # for math-verify, whose slowest answers would not end

#: Takes the texts of N prompts and completions, and their records; returns N numbers, or None for
#: completions to which it gives no reward.
RewardFunction = Callable[[list[str], list[str], list[Record]], Sequence[float | None]]


class Judged(NamedTuple):
    """A completion, and the data by which functions judge it."""

    prompt: str
    text: str
    record: Record
    length: int  # tokens


#: A function as it is called here: returns a reward for each completion, NaN if it gives none, or
#: why it failed.
Judge = Callable[[list[Judged]], list[float | Failure]]


class Scored(NamedTuple):
    """The rewards of N completions, on the CPU; NaN where there is none."""

    total: Tensor  # float32 [N], the weighted sum
    unshaped: Tensor  # float32 [N], without ``overlong``, if another function counts
    parts: dict[str, Tensor]  # float32 [N] by the name of the function
    failed: Tensor  # bool [N], whether a function failed and ``reward_failed`` took its place

    def rows(self, index: Tensor) -> "Scored":
        """Return the rewards of the completions at ``index``."""
        return tree_map(lambda values: values[index], self)  # type: ignore[no-any-return]

    @property
    def known(self) -> Tensor:
        """Which completions have a reward, bool [N]."""
        return ~self.total.isnan()


def concatenate(scored: Sequence[Scored]) -> Scored:
    """Return the rewards of several batches of completions as one."""
    return tree_map(lambda *values: torch.cat(values), *scored)  # type: ignore[no-any-return]


class Rewards:
    """The functions that ``config.reward`` names, with their weights.

    With ``none`` there is only the check of an embedded task, which shows progress, or no function.

    Raises:
        ValueError: A function does not exist, or a weight is not finite.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.model: RewardModel | None = None
        self._workers: dict[str, Workers] = {}
        self._read: set[str] = set()  # answers
        self._failed = config.reward_failed
        self._judges: dict[str, Judge] = {}
        self._weights: dict[str, float] = {}
        self._rewarding: set[str] = set()  # without them a completion has no reward
        rewarded = getattr(config, "has_reward", True)
        names = config.reward if rewarded else _CHECKS.get(config.prompts[0], ())
        for text in names:
            path, weight = _weighted(text)
            name = "reward_model" if path.startswith("model:") else path.rpartition(":")[2]
            name = path if name in self._judges else name
            if name in self._judges:
                raise ValueError(f"reward must name different functions, got {path!r} twice")
            self._judges[name] = self._judge(path, config, device)
            self._weights[name] = weight
            if weight and path != "overlong":
                self._rewarding.add(name)
        if not any(self._weights.values()) and rewarded:
            raise ValueError(f"reward must have a weight other than 0, got {config.reward}")
        self._rewarding = self._rewarding or {n for n, weight in self._weights.items() if weight}

    def __len__(self) -> int:
        """Return the number of functions."""
        return len(self._judges)

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str | None],
        lengths: Sequence[int],
    ) -> Scored:
        """Reward completions; None is a completion that does not exist.

        A completion has a reward if a function gives one, other than ``overlong`` beside others
        and functions of weight 0.

        Raises:
            RewardError: A function raised, took too long, or returned a wrong number of rewards or
                a reward that is not finite, and there is no ``reward_failed``.
        """
        made = {i: text for i, text in enumerate(completions) if text is not None}
        rows, asked = list(made), [prompts[i] for i in made]
        given = [
            Judged(prompt.text, text, prompt.judged, lengths[i])
            for (i, text), prompt in zip(made.items(), asked, strict=True)
        ]
        failed = torch.zeros(len(prompts), dtype=torch.bool)
        total, unshaped = torch.zeros(2, len(prompts), dtype=torch.float64)
        known = torch.full((len(prompts),), not self._judges)
        parts: dict[str, Tensor] = {}
        for name in self._judges:
            rewards, failures = self._outcomes(name, given)
            failed[[rows[i] for i in failures]] = True
            part = torch.full((len(prompts),), torch.nan, dtype=torch.float64)
            part[rows] = rewards
            weighted = self._weights[name] * part.nan_to_num()
            total += weighted
            if name in self._rewarding:
                unshaped += weighted
                known |= ~part.isnan()
            parts[name] = part.float()
        if not total.float().isfinite().all():
            raise RewardError("reward: the weighted sum must be finite in float32")
        total, unshaped = (sums.float().where(known, torch.nan) for sums in (total, unshaped))
        return Scored(total, unshaped, parts, failed)

    def means(
        self, scored: Scored, *, failures: int | None = None, prefix: str = "reward"
    ) -> dict[str, float]:
        """Return the means of rewards, over those that exist, under the names of the log.

        The counts are of completions without a reward, of those that math-verify could not compare
        in time since the last call, and of failures.
        """
        named = {f"{prefix}/{name}": part for name, part in scored.parts.items()}
        named = {prefix: scored.total, **(named if len(named) > 1 else {})} if named else {}
        row = {
            name: float(rewards.double().nanmean())
            for name, rewards in named.items()
            if not rewards.isnan().all()
        }
        if missing := int((~scored.known).sum()):
            row[f"{prefix}_missing"] = float(missing)
        if late := sum(workers.late for workers in self._workers.values()):
            row[f"{prefix}_late"] = float(late)
            for workers in self._workers.values():
                workers.late = 0
        if self._failed is not None:
            row[f"{prefix}_failures"] = float(scored.failed.sum() if failures is None else failures)
        return row

    def probe(self, prompts: list[Prompt]) -> None:
        """Check all answers, and try the functions on empty completions of a few prompts.

        Raises:
            RewardError: A function fails on any completion, or with ``reward_failed`` on all, or
                an answer is not text, or math-verify does not find it equal to itself.
        """
        if "math_verify" in self._workers:
            self._check_answers(prompts, self._workers["math_verify"])
        if "exact_match" in self._judges:
            for prompt in prompts:
                if not isinstance(answer := prompt.record.get("answer"), str):
                    raise RewardError(
                        f'reward exact_match: "answer" must be text, got {answer!r} for '
                        f"{_quoted(prompt.text)}"
                    )
        few = prompts[:: -(-len(prompts) // _PROBED)]
        given = [Judged(prompt.text, "", prompt.judged, 1) for prompt in few]
        for name in self._judges:
            failures = self._outcomes(name, given)[1]
            if len(failures) == len(few):
                raise _error(name, failures[0], given[0])

    def close(self) -> None:
        """End the processes of functions; a later call starts new ones."""
        for workers in self._workers.values():
            workers.close()

    def _check_answers(self, prompts: list[Prompt], workers: Workers) -> None:
        new = {math_answers.decisive(prompt.record.get("answer")): prompt for prompt in prompts}
        asked = [prompt for answer, prompt in new.items() if answer not in self._read]
        right = None  # the right completion
        outcomes = workers.call([(prompt.text, right, prompt.record) for prompt in asked])
        for prompt, outcome in zip(asked, outcomes, strict=True):
            if outcome != [1.0]:
                equal = "is not equal to itself"
                reason = outcome.reason if isinstance(outcome, Failure) else equal
                raise RewardError(
                    f'reward math_verify: "answer" must be a formula that math-verify can compare, '
                    f"got {prompt.record.get('answer')!r} for {_quoted(prompt.text)}: it {reason}"
                )
        self._read |= set(new)

    def _judge(self, path: str, config: RunConfig, device: torch.device) -> Judge:
        if path == "exact_match":
            return partial(_in_this_process, exact_match)
        if path == "math_verify":
            if find_spec("math_verify") is None:
                raise ValueError(
                    "reward: math_verify needs math-verify: pip install 'fastrl-kernels[math]'"
                )
            source = Source(math_answers.__file__, "in_worker", is_file=True)
            self._workers[path] = Workers(source, config.reward_timeout or _SECONDS)
            return partial(_by_math_verify, self._workers[path])
        if path == "overlong":
            longest = config.max_new_tokens
            return lambda given: list(overlong([one.length for one in given], longest))
        if path.startswith("model:"):
            if self.model is not None:
                raise ValueError("reward must name one reward model at most")
            self.model = RewardModel(path.removeprefix("model:"), device, config)
            return partial(_in_this_process, self.model)
        function = import_function(path, "reward")
        if config.reward_timeout is None:
            return partial(_in_this_process, function)
        self._workers[path] = Workers(source_of(path), config.reward_timeout)
        return partial(_in_workers, self._workers[path])

    def _outcomes(self, name: str, given: list[Judged]) -> tuple[Tensor, dict[int, Failure]]:
        """Return the rewards of a function, float64 [N], and its failures by index."""
        found = self._judges[name](given) if given else []
        failures = {i: one for i, one in enumerate(found) if isinstance(one, Failure)}
        if failures and self._failed is None:
            first = min(failures)
            raise _error(name, failures[first], given[first])
        rewards = [self._failed if isinstance(one, Failure) else one for one in found]
        return torch.tensor(rewards, dtype=torch.float64), failures


def _error(name: str, failure: Failure, given: Judged) -> RewardError:
    where = f"for {_quoted(given.prompt)} -> {_quoted(given.text)}"
    error: Any = RewardError(f"reward {name}: {failure.reason}, {where}")
    error.__notes__ = [failure.trace] if failure.trace else []
    return error  # type: ignore[no-any-return]


def exact_match(prompts: list[str], completions: list[str], records: list[Record]) -> list[float]:
    """Return 1 for a completion that equals ``"answer"`` up to surrounding space, else 0.

    Raises:
        ValueError: The answer of a record is not text.
    """
    for record in records:
        if not isinstance(record.get("answer"), str):
            raise ValueError(f'"answer" must be text, got {record.get("answer")!r}')  # noqa: TRY004
    return [
        float(completion.strip() == record["answer"].strip())
        for completion, record in zip(completions, records, strict=True)
    ]


def overlong(lengths: Sequence[int], max_new_tokens: int) -> list[float]:
    """Return the soft overlong punishment of DAPO, https://arxiv.org/abs/2503.14476, equation 13.

    It is 0 up to four fifths of ``max_new_tokens``, and then falls linearly to -1.
    """
    buffer = max(1, max_new_tokens // 5)
    start = max_new_tokens - buffer
    return [max(-1.0, min(0.0, (start - length) / buffer)) for length in lengths]


def _weighted(text: str) -> tuple[str, float]:
    """Return the function and the weight in ``NAME=WEIGHT`` or ``NAME``."""
    name, _, number = text.rpartition("=")
    try:
        weight = float(number) if name else 1.0
    except ValueError:  # a path with an equals sign
        name, weight = text, 1.0
    if not abs(weight) < float("inf"):
        raise ValueError(f"reward must have finite weights, got {text!r}")
    return name or text, weight


def _in_this_process(function: RewardFunction, given: list[Judged]) -> list[float | Failure]:
    """Call a function with all completions at once, or if it raises, with each one alone."""
    try:
        return _checked(function, given)
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        if len(given) == 1:
            return [reward_calls.failure(error)]
    alone = [_in_this_process(function, [one])[0] for one in given]
    if any(isinstance(one, Failure) for one in alone):
        return alone
    try:  # it may fail only on several, or pass now
        return _checked(function, given)
    except (Exception, SystemExit) as error:
        return [reward_calls.failure(error)] * len(given)


def _in_workers(workers: Workers, given: list[Judged]) -> list[float | Failure]:
    """Call a function with one completion at a time, in processes that can be killed."""
    found = workers.call([one[:3] for one in given])
    return [one if isinstance(one, Failure) else _number(one[0]) for one in found]


def _by_math_verify(workers: Workers, given: list[Judged]) -> list[float | Failure]:
    """Return 0 for what cannot be compared in time: the answers were, before the run."""
    found = _in_workers(workers, given)
    late = [isinstance(one, Failure) and one.late for one in found]
    workers.late += sum(late)
    return [0.0 if slow else one for slow, one in zip(late, found, strict=True)]


def _checked(function: RewardFunction, given: list[Judged]) -> list[float | Failure]:
    columns = ([one[i] for one in given] for i in range(3))
    return [_number(value) for value in reward_calls.call(function, *columns)]


def _number(value: Any) -> float | Failure:
    if value is None:
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Failure(f"must return numbers, got {value!r}")
    if not torch.tensor(number, dtype=torch.float64).float().isfinite():
        return Failure(f"must return numbers that are finite in float32, got {number}")
    return number


def _quoted(text: str, longest: int = 300) -> str:
    shown = repr(text)
    return shown if len(shown) <= longest else f"{shown[:longest]}... ({len(text)} characters)"
