"""One timer for every benchmark: providers of the same work, interleaved in one run.

Providers run in a new random order each round, so that a slowdown of the machine affects all of
them. Calls rotate over several input sets, so that no input is in the cache. A ratio is the median
over rounds of the two times of the same round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

COPIES = ("floor", "clone")  # kinds that move the bytes and compute nothing
OTHER_WORK = ("same rows", "all rows")  # kinds that compute something else, without an error
AT_MOST = (*COPIES, "same rows")  # kinds of which fastrl may take a multiple, and no more
SLOW = 1.0  # seconds; a provider above it takes part in every seventh round only
SLOW_TAKES_EVERY = 7
LEAST_TIMED = 2e-3  # seconds; quicker calls are repeated and averaged
Inputs = dict[str, Any]


def _unchanged(inputs: Inputs) -> Inputs:
    return inputs


class Provider(NamedTuple):
    name: str
    kind: str  # fastrl <backend>, fastrl cpu in place, eager, compile, loop, floor, clone
    run: Callable[[Inputs], Any]
    prepare: Callable[[Inputs], Inputs] = _unchanged  # before each call, not timed

    @property
    def prepares(self) -> bool:
        """Whether a call needs inputs of its own."""
        return self.prepare is not _unchanged


class Case(NamedTuple):
    op: str
    work: str  # what is computed, in a few words
    shape: str
    dtype: torch.dtype
    bytes_moved: int  # the least that this work must read and write
    inputs: Callable[[int], Inputs]  # from a seed
    providers: list[Provider]
    error: Callable[[Any, Inputs], float]  # distance of a provider's answer from float64

    @property
    def label(self) -> str:
        return f"{self.op} {self.shape} {str(self.dtype).removeprefix('torch.')}"


class Timing(NamedTuple):
    provider: str
    kind: str
    seconds: dict[int, float]  # by round; empty when the provider could not run
    error: float
    failure: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds.values())

    def quantiles(self) -> tuple[float, float]:
        ordered = sorted(self.seconds.values())
        return ordered[len(ordered) // 5], ordered[len(ordered) * 4 // 5]


def ratio(other: Timing, ours: Timing) -> float:
    """Time of `other` relative to `ours`, paired by round."""
    both = other.seconds.keys() & ours.seconds.keys()
    return statistics.median(other.seconds[turn] / ours.seconds[turn] for turn in both)


def rotation(case: Case, sets: int) -> Iterator[Inputs]:
    held = [case.inputs(seed) for seed in range(sets)]
    while True:
        yield from held


def measure(case: Case, *, rounds: int, warmup: int, sets: int, seed: int = 0) -> list[Timing]:
    """Check every provider against float64, then time them in turn."""
    torch._dynamo.reset()  # each shape compiled for itself: the strongest form of torch.compile
    inputs = rotation(case, sets)
    first = next(inputs)
    checked = [_check(case, provider, first) for provider in case.providers]
    running = [pair for pair in zip(case.providers, checked, strict=True) if not pair[1].failure]
    usual = {provider.name: _warm_up(provider, inputs, warmup) for provider, _ in running}
    order = random.Random(seed)
    for turn in range(rounds):
        for provider, timing in order.sample(running, len(running)):
            seconds = usual[provider.name]
            if seconds < SLOW or turn % SLOW_TAKES_EVERY == 0:
                # One untimed call before each timed one: memory that another provider freed may
                # have left the machine (virtual machines return it), and caches hold its data.
                _timed(provider, inputs)
                calls = max(1, round(LEAST_TIMED / seconds))
                timing.seconds[turn] = sum(_timed(provider, inputs) for _ in range(calls)) / calls
    return checked


def _warm_up(provider: Provider, inputs: Iterator[Inputs], calls: int) -> float:
    return statistics.median(_timed(provider, inputs) for _ in range(calls))


def pedantic(benchmark: Any, case: Case, provider: Provider) -> None:
    """The same call under pytest-benchmark, which keeps its history; one provider at a time."""
    inputs = rotation(case, sets=3)
    error = _error(case, provider, next(inputs))
    benchmark.group = f"{case.label}, {case.work}"
    benchmark.extra_info.update(error=error, bytes_moved=case.bytes_moved)
    benchmark.pedantic(
        provider.run,
        setup=lambda: ((provider.prepare(next(inputs)),), {}),
        rounds=20,
        warmup_rounds=3,
    )


def _check(case: Case, provider: Provider, inputs: Inputs) -> Timing:
    try:
        error = _error(case, provider, inputs)
    except Exception as failure:  # a missing backend is a row of the table, not the end of the run
        reason = str(failure).strip().splitlines() or [""]
        return Timing(provider.name, provider.kind, {}, float("nan"), f"{reason[0][:160]}")
    return Timing(provider.name, provider.kind, {}, error)


def _error(case: Case, provider: Provider, inputs: Inputs) -> float:
    answer = provider.run(provider.prepare(inputs))
    return float("nan") if provider.kind in (*COPIES, *OTHER_WORK) else case.error(answer, inputs)


def _timed(provider: Provider, inputs: Iterator[Inputs]) -> float:
    ready = provider.prepare(next(inputs))
    start = time.perf_counter()
    answer = provider.run(ready)
    seconds = time.perf_counter() - start
    del answer  # kept until here: returning memory is not part of the work
    return seconds
