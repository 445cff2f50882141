"""Runs cases, shrinks failing ones, and collects statistics."""

import dataclasses
import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tests.calls.case import IN_TORCH, SIMPLEST, Case
from tests.calls.combined import cases
from tests.calls.examine import Signature, Verdict, examine, signatures
from tests.calls.table import ROWS

from .draw import draw

#: More than this share of cases with something in doubt, and a run says too little. About 11 of
#: 100 are drawn so: rows without a distribution and infinities on purpose, the rest on bounds.
MOST_IN_DOUBT = 0.2
MOST_TRIALS = 600  # of shrinking
#: A device: tensors of a CPU that are treated as a GPU's (tests/gpu/device/pretended.py).
PRETENDED = "pretended"
#: Triton compiles a kernel for nearly every choice of options, so these many cases share theirs.
WITH_SAME_OPTIONS = 10


@dataclasses.dataclass(frozen=True)
class Run:
    """Which cases are run, and on what."""

    cases: int  # of all functions, or of each row of the table
    seed: int = 0
    first: int = 0
    backend: str = "cpu"
    device: str = "cpu"
    shrink: bool = True
    function: str | None = None  # None: any
    table: bool = False  # the rows of the table instead of drawn cases
    seconds: float = math.inf  # limit of the run

    @property
    def executed(self) -> bool:
        """Whether the kernels are a GPU's but the device is a CPU, which takes its time."""
        return self.backend in ("triton", "cuda") and self.device in ("cpu", PRETENDED)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @functools.cached_property
    def of_table(self) -> list[Case]:
        """The first cases of all rows, then the second ones, and so on: a run may be cut."""
        found = []
        for function, options in ROWS.values():
            no_kernels = function in IN_TORCH and self.backend in ("triton", "cuda")
            if self.function in (None, function) and not no_kernels:
                options = {name: x for name, x in options.items() if name != "some"}
                some = cases(self.backend, function, options)[: self.cases]
                found.append(map(self.taken, some))
        return [case for turn in itertools.zip_longest(*found) for case in turn if case]

    def case(self, index: int) -> Case:
        if self.table:
            return self.of_table[index]
        float64 = self.backend in ("reference", "auto")
        compiles = self.backend == "triton"
        first = index - index % WITH_SAME_OPTIONS if compiles else index
        case = draw(self.seed, first, self.function, float64=float64, executed=self.executed)
        case = self.taken(case)
        return case.changed(seed=index) if compiles else case

    def taken(self, case: Case) -> Case:
        """Return a case without what `token_logprobs` says that the kernels of GPUs do not take."""
        without = {
            "cuda": ("largest", "lowest-some"),
            # 2^127.5 / log2(e) and above: NaN where the largest logit is another token's
            "triton": ("largest",),
        }.get(self.backend, ())
        features = tuple(one for one in case.features if one not in without)
        cold = self.backend == "cuda" and case.temperature == 1e-28
        return case.changed(temperature=1e-3 if cold else case.temperature, features=features)

    def examine(self, case: Case) -> Verdict:
        return examine(case, self.backend, "cuda" if self.device == PRETENDED else self.device)

    def indices(self) -> range:
        count = len(self.of_table) if self.table else self.first + self.cases
        return range(self.first, count)


@dataclasses.dataclass
class Failure:
    """The first case of a kind of difference, as found and shrunk, and the number of such cases."""

    found: Case
    shrunk: Case
    text: str
    count: int = 1


@dataclasses.dataclass
class Report:
    """The results of a run."""

    run: Run
    cases: Counter = dataclasses.field(default_factory=Counter)  # by function
    refused: int = 0
    failing: int = 0
    in_doubt: int = 0
    left: int = 0  # cases that there was no time for
    doubtful_cases: Counter = dataclasses.field(default_factory=Counter)  # by kind
    decisions: Counter = dataclasses.field(default_factory=Counter)  # by kind
    failures: dict[Signature, Failure] = dataclasses.field(default_factory=dict)
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def share_in_doubt(self) -> float:
        return self.in_doubt / max(self.cases.total(), 1)

    def add(self, case: Case, verdict: Verdict, again: Callable[[Case], Verdict]) -> None:
        """Count a case, and shrink it if it fails in a new way; `again` examines one."""
        self.cases[case.function] += 1
        self.refused += verdict.refused
        self.in_doubt += bool(verdict.doubts)
        self.decisions.update(verdict.doubts)
        self.doubtful_cases.update(verdict.doubts.keys())
        if not verdict.differences:
            return
        self.failing += 1
        kind = signatures(case, verdict)[0]
        if kind in self.failures:
            self.failures[kind].count += 1
            return
        small, text = case, str(verdict.differences[0])
        if self.run.shrink:
            small = shrunk(case, lambda one: kind in signatures(one, again(one)))
            found = zip(signatures(small, last := again(small)), last.differences, strict=True)
            text = next((str(one) for name, one in found if name == kind), text)
        self.failures[kind] = Failure(case, small, text)

    def __str__(self) -> str:
        run = self.run
        lines = [
            f"{self.cases.total()} cases of seed {run.seed} on {run.backend} in "
            f"{time.monotonic() - self.started:.0f} s: "
            f"{self.failing} failed in {len(self.failures)} ways, "
            f"{self.refused} were refused as they should be, "
            f"{self.in_doubt} have something in doubt ({self.share_in_doubt:.1%})",
            "  cases: " + _counts(self.cases),
            "  in doubt, cases: " + _counts(self.doubtful_cases),
            "  in doubt, decisions: " + _counts(self.decisions),
        ]
        for (function, part, kind), failure in sorted(self.failures.items()):
            lines += ["", f"{function}, {part}, {kind}: {failure.count} cases; {failure.text}"]
            lines += [f"    {failure.shrunk}"]
            if failure.found != failure.shrunk:
                lines += [f"    found as {failure.found}"]
        if self.left:
            lines += ["", f"cut after {run.seconds:.0f} s: {self.left} cases are left"]
        return "\n".join(lines)


def _counts(counter: Counter) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"


def perform(run: Run, before: Callable[[Case], None] = lambda case: None) -> Report:
    """Run the cases in this process; `before` hears of each."""
    report = Report(run)
    for case in map(run.case, run.indices()):
        before(case)
        report.add(case, run.examine(case), run.examine)
    return report


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the simplest case found that still fails."""
    trials = iter(range(MOST_TRIALS))
    while True:
        found = (one for one, _ in zip(_simpler(case), trials, strict=False) if fails(one))
        simpler = next(found, None)
        if simpler is None:
            return case
        case = simpler


def _simpler(case: Case) -> Iterator[Case]:
    """Yield cases with one thing less: the largest steps first."""
    names = [name for name in case.options if name != "seed"]
    for name in names:
        yield case.changed(**{name: SIMPLEST[name]})
    for name in names:
        for value in _parts(case.options[name]):
            yield case.changed(**{name: value})
    if case.seed > 9:
        yield from (case.changed(seed=seed) for seed in range(10))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list) and len(value) > 1:
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
    elif isinstance(value, dict):
        for key in value:
            yield {other: value[other] for other in value if other != key}
        for key, inner in value.items():
            yield from ({**value, key: part} for part in _parts(inner))
    elif isinstance(value, int) and not isinstance(value, bool) and value > 2:
        yield from (smaller for smaller in (2, 3, value // 2, value - 1) if smaller < value)
