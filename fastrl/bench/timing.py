"""The protocol: providers of the same work take turns in one process.

They run in a new random order each round, so that a slowdown of the machine meets all of them, and
calls rotate over several sets of inputs, so that none stays in the cache. A ratio is the median
over rounds of the two times of one round. A GPU's time is taken by CUDA events around the full
public call, a CPU's by the clock.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastrl.bench.case import BACKWARD, BOTH, FORWARD, Case, Inputs, Provider
from fastrl.bench.conditions import Conditions
from fastrl.bench.memory import Peak, keep_freed

LEAST_TIMED = 20e-3  # seconds; on a CPU quicker calls are repeated, and their median counts
MOST_REPEATED = 0.1  # seconds of a turn, with what is not timed
SLOW = 1.0  # seconds; a slower call is warmed up by the two before it, which find error and memory
SIGN_OF_LIFE = 5.0  # seconds between two while providers are timed
CALLS = 20  # for the host's time alone and for the kernels' alone
LATE = "not measured in time"


class Plan(NamedTuple):
    """How often providers are called; ``seconds`` bounds the time of one, so slow ones run less."""

    rounds: int = 21
    warmup: int = 3
    sets: int = 3
    seconds: float = 6.0
    least: int = 3  # turns of a slow provider
    #: Whether time is short: a case gets its share of it, and times fastrl beside eager before it
    #: calls other libraries, and these before torch.compile, which takes longest to start.
    hurried: bool = False

    def until(self, end: float, jobs: int) -> float:
        """Return when the first of some jobs should end, by the monotonic clock."""
        now = time.monotonic()
        return min(end, now + 2 * (end - now) / jobs) if self.hurried else end


@dataclasses.dataclass
class Measured:
    """What one provider of a case took."""

    name: str
    kind: str
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)  # by round
    peak: int | None = None  # bytes beyond the inputs; None where that cannot be known
    error: float | None = None  # None where the answer is not of this work
    host: float | None = None  # seconds until a call returns, where nothing waits for the GPU
    kernels: float | None = None  # seconds of a call's kernels, without the gaps between them
    failure: str = ""


class ContextLostError(RuntimeError):
    """A provider left the GPU in a state in which every call of this process fails."""

    def __init__(self, provider: str, why: str) -> None:
        super().__init__(f"{provider}: {why}")
        self.provider, self.why = provider, why


def measure(
    case: Case,
    device: torch.device,
    plan: Plan,
    left_out: Mapping[str, str] | None = None,
    trying: Callable[[str], None] = lambda name: None,
    conditions: Conditions | None = None,
    until: float = math.inf,
    so_far: Callable[[list[Measured]], None] = lambda found: None,
) -> list[Measured]:
    """Check every provider against float64, take its peak memory, then time all in turn.

    If the time is over, rounds end early, and providers that have not been called fail as `LATE`.

    Args:
        case: What is measured.
        device: Where its inputs are.
        plan: How often.
        left_out: Providers that ended an earlier process, and why; they are not called.
        trying: Told the name of the provider that is called next and may take long to compile, and
            while all are timed, again and again, that none is.
        conditions: Taken before each round.
        until: The end of the time, by the monotonic clock.
        so_far: Told what has been found, now and then.
    """
    if "torch._dynamo" in sys.modules:  # each shape compiled for itself: its strongest form
        torch._dynamo.reset()
    keep_freed(False)
    run, order = Calls(case, device, plan, trying), random.Random(0)
    for provider in case.providers:
        run.found[provider.name].failure = (left_out or {}).get(provider.name, "")
    called: list[Provider] = []
    stages = _stages(case.providers) if plan.hurried else [list(case.providers)]
    for number, stage in enumerate(stages):
        reached = run.prepare(stage, until if number else math.inf)
        if not reached:
            continue
        called += reached
        begin, said = plan.rounds * number // len(stages), time.monotonic()
        for turn in range(begin, plan.rounds * (number + 1) // len(stages)):
            if turn > begin and time.monotonic() > until:
                break
            if conditions is not None:
                conditions.take()
            for provider in order.sample(called, len(called)):
                if time.monotonic() - said > SIGN_OF_LIFE:
                    trying("")
                    so_far(list(run.found.values()))
                    said = time.monotonic()
                if (turn - begin) % run.intervals.get(provider.name, 1) == 0:
                    run.attempt(provider, functools.partial(run.take, turn=turn))
        if time.monotonic() < until:
            so_far(list(run.found.values()))
    if device.type == "cuda" and launch_bound(case) and time.monotonic() < until:
        for provider in case.providers:
            run.attempt(provider, run.split)
    return list(run.found.values())


def _stages(providers: Sequence[Provider]) -> list[list[Provider]]:
    """Return which providers are called first, next and last."""

    def turn(provider: Provider) -> int:
        first = provider.kind == "eager" or provider.kind.startswith("fastrl")
        return 0 if first else 2 if provider.kind == "compile" else 1

    return [[*stage] for _, stage in itertools.groupby(sorted(providers, key=turn), turn)]


def launch_bound(case: Case) -> bool:
    """Return whether a GPU computes the case in less time than a call takes the host."""
    return not case.flops and case.bytes_moved < 2**28


class Calls:
    """Calls of the providers of a case on its inputs, and what they have taken so far."""

    def __init__(
        self,
        case: Case,
        device: torch.device,
        plan: Plan,
        trying: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.case, self.device, self.plan, self.trying = case, device, plan, trying
        self.first, *others = (case.inputs(seed) for seed in range(plan.sets))
        self.turns = itertools.cycle([self.first, *others])
        self.found = {one.name: Measured(one.name, one.kind) for one in case.providers}
        self.intervals: dict[str, int] = {}  # rounds from one turn of a provider to its next
        self.slow: dict[str, float] = {}  # seconds of a call, if it is slow
        self.repeats: dict[str, int] = {}  # timed calls of a turn
        self.untimed: dict[str, bool] = {}  # whether a turn begins with an untimed call

    def attempt(self, provider: Provider, act: Callable[[Provider, Measured], None]) -> None:
        """Act, unless the provider has failed; failing is a row of the table, not the end."""
        mine = self.found[provider.name]
        if mine.failure:
            return
        try:
            act(provider, mine)
        except Exception as failure:
            mine.failure = _in_words(failure)
            if self.device.type != "cuda":
                return
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError:
                raise ContextLostError(provider.name, mine.failure) from failure

    def prepare(self, providers: Sequence[Provider], until: float) -> list[Provider]:
        """Check providers, and find how often each takes part; return those that time allows."""
        keep_freed(False)
        reached = []
        for provider in providers:
            if time.monotonic() > until:
                self.found[provider.name].failure = self.found[provider.name].failure or LATE
                continue
            reached.append(provider)
            self.trying(provider.name)
            self.attempt(provider, self.check)
        keep_freed(True)
        for provider in reached:
            self.trying(provider.name)
            self.attempt(provider, self.warm_up)
        self.trying("")
        return reached

    def check(self, provider: Provider, mine: Measured) -> None:
        """Find the error and the peak memory; the first call may compile."""
        output, answer = self.answered(provider)
        self.trying(provider.name)  # what follows does not count as its first call
        if provider.kind != "floor":
            mine.error = self.error(output, answer)
        del output, answer
        call = self.call(provider, self.first)
        with Peak(self.device) as peak:
            begin = time.perf_counter()
            call()
            taken = time.perf_counter() - begin
        mine.peak = peak.bytes
        if taken > SLOW and self.device.type != "cuda":
            self.slow[provider.name] = taken

    def answered(self, provider: Provider) -> tuple[Any, Any]:
        """Return what a call of a provider returns, after the output of its forward."""
        if self.case.step != BOTH:
            return None, self.call(provider, self.first)()
        inputs, backward = self._ready(provider, self.first)
        output = provider.forward(inputs)
        return output, backward(output)

    def error(self, output: Any, answer: Any) -> float:
        """Return the error of an answer; of gradients, the output's if that is larger."""
        found = [self.case.error(answer, self.first)]
        if self.case.output_error is not None:
            found.append(self.case.output_error(output, self.first))
        if any(math.isnan(one) for one in found):
            raise ValueError("its answer is not finite")
        return max(found)

    def warm_up(self, provider: Provider, mine: Measured) -> None:
        """Find how often a provider takes part, from what a call of it takes."""
        slow = self.slow.get(provider.name)
        taken, begin = [slow or self.timed(provider)], time.perf_counter()
        while len(taken) < self.plan.warmup and taken[0] < SLOW:
            taken.append(self.timed(provider))
        usual = min(taken)  # the others may have waited for new pages
        # with what is not timed: inputs that are prepared, the forward before a backward
        whole = max(usual, (time.perf_counter() - begin) / max(1, len(taken) - 1))
        quick = self.device.type != "cuda" and usual < LEAST_TIMED
        repeats = min(LEAST_TIMED / max(usual, 1e-6), MOST_REPEATED / whole) if quick else 1
        self.repeats[provider.name] = max(1, round(repeats))
        self.untimed[provider.name] = usual < SLOW
        cost = whole * (self.untimed[provider.name] + self.repeats[provider.name])  # of a turn
        able = max(self.plan.least, int(min(self.plan.rounds, self.plan.seconds / max(cost, 1e-9))))
        self.intervals[provider.name] = max(1, self.plan.rounds // able)

    def take(self, provider: Provider, mine: Measured, *, turn: int) -> None:
        """Time one turn of a provider."""
        if self.untimed[provider.name]:  # fills the caches with its data
            self.timed(provider)
        calls = self.repeats[provider.name]
        mine.seconds[turn] = statistics.median(self.timed(provider) for _ in range(calls))

    def split(self, provider: Provider, mine: Measured) -> None:
        """Find the host's share of a call, and that of its kernels."""
        calls = [self.call(provider, self.first) for _ in range(CALLS)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for call in calls:
            call()
        mine.host = (time.perf_counter() - begin) / CALLS
        torch.cuda.synchronize()
        calls = [self.call(provider, self.first) for _ in range(CALLS)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for call in calls:
                call()
            torch.cuda.synchronize()
        kernels = (one for one in profile.key_averages() if one.device_type.name == "CUDA")
        taken = sum(kernel.self_device_time_total for kernel in kernels)
        mine.kernels = taken / CALLS / 1e6 or None  # the profiler may be unable to record any

    def call(self, provider: Provider, inputs: Inputs) -> Callable[[], Any]:
        """Prepare a call up to the part that is timed."""
        step = self.case.step
        ready, backward = self._ready(provider, inputs)
        if step == FORWARD:
            return lambda: provider.forward(ready)
        if step == BACKWARD:
            output = provider.forward(ready)
            return lambda: backward(output)
        return lambda: backward(provider.forward(ready))

    def _ready(self, provider: Provider, inputs: Inputs) -> tuple[Inputs, Callable[[Any], Any]]:
        """Return the inputs of a provider's forward, and its backward."""
        ready = provider.prepare(inputs) if provider.prepare else inputs
        leaves = {name: ready[name].detach().requires_grad_() for name in self.case.leaves}
        ready = ready | leaves

        def backward(output: Any) -> Any:
            if provider.backward is not None:
                return provider.backward(output, ready)
            outputs = [output] if isinstance(output, torch.Tensor) else list(output)
            ones = [torch.ones_like(one) for one in outputs]
            return torch.autograd.grad(outputs, list(leaves.values()), ones)

        return ready, backward

    def timed(self, provider: Provider) -> float:
        """Return the seconds of a call."""
        call = self.call(provider, next(self.turns))
        if self.device.type != "cuda":
            begin = time.perf_counter()
            answer = call()
            seconds = time.perf_counter() - begin
            del answer  # kept until here: returning memory is not part of the work
            return seconds
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        answer = call()
        end.record()
        end.synchronize()
        del answer
        return float(start.elapsed_time(end)) / 1e3


def _in_words(failure: Exception) -> str:
    reason = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {reason[0][:160]}"
