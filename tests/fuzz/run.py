"""Runs many cases, shrinks what fails, and says what there was."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable

from .case import Case
from .draw import draw
from .examine import examine, signature
from .shrink import shrunk

Signature = tuple[str, str, str]


@dataclasses.dataclass
class Failure:
    """The first case of a kind of difference, as found and shrunk, and how many there were."""

    found: Case
    shrunk: Case
    text: str
    count: int = 1


@dataclasses.dataclass
class Report:
    """What a run did."""

    cases: Counter = dataclasses.field(default_factory=Counter)  # by function
    refused: Counter = dataclasses.field(default_factory=Counter)  # by function
    ambiguous_cases: Counter = dataclasses.field(default_factory=Counter)  # by kind
    decisions: Counter = dataclasses.field(default_factory=Counter)  # by kind
    failing: int = 0
    with_doubt: int = 0
    failures: dict[Signature, Failure] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.cases.values())

    def add(self, case: Case, refused: bool, doubts: Counter) -> None:
        self.cases[case.function] += 1
        self.refused[case.function] += refused
        self.with_doubt += bool(doubts)
        self.decisions.update(doubts)
        self.ambiguous_cases.update(doubts.keys())


@dataclasses.dataclass(frozen=True)
class Run:
    """Which cases are run, and on what."""

    cases: int
    seed: int = 0
    first: int = 0
    backend: str = "cpu"
    device: str = "cpu"
    interpreted: bool = False
    shrink: bool = True

    def case(self, index: int) -> Case:
        return draw(
            self.seed,
            index,
            float64=self.backend in ("reference", "auto"),
            interpreted=self.interpreted,
        )


def fails_as(kind: Signature, run: Run) -> Callable[[Case], bool]:
    """Return whether a case fails in the same way."""

    def fails(case: Case) -> bool:
        found = examine(case, run.backend, run.device).differences
        return any(signature(case, difference) == kind for difference in found)

    return fails


def perform(run: Run, before: Callable[[int], None] = lambda index: None) -> Report:
    """Run the cases; `before` hears the number of each."""
    report, started = Report(), time.monotonic()
    for index in range(run.first, run.first + run.cases):
        before(index)
        case = run.case(index)
        verdict = examine(case, run.backend, run.device)
        report.add(case, verdict.refused, verdict.doubts)
        if verdict.differences:
            report.failing += 1
            _note(report, case, verdict.differences[0], run)
    report.seconds = time.monotonic() - started
    return report


def _note(report: Report, case: Case, difference: object, run: Run) -> None:
    kind = signature(case, difference)
    known = report.failures.get(kind)
    if known is not None:
        known.count += 1
        return
    small = shrunk(case, fails_as(kind, run)) if run.shrink else case
    texts = [
        str(one)
        for one in examine(small, run.backend, run.device).differences
        if signature(small, one) == kind
    ]
    report.failures[kind] = Failure(case, small, texts[0] if texts else str(difference))


def lines_of(report: Report, run: Run) -> list[str]:
    """Return what a run found, to be read."""
    lines = [
        f"{report.total} cases of seed {run.seed} on {run.backend} in {report.seconds:.0f} s: "
        f"{report.failing} failed in {len(report.failures)} ways, "
        f"{sum(report.refused.values())} were refused as they should be, "
        f"{report.with_doubt} have something in doubt",
        "  cases: " + _counts(report.cases),
        "  in doubt, cases: " + _counts(report.ambiguous_cases),
        "  in doubt, decisions: " + _counts(report.decisions),
    ]
    for (function, part, kind), failure in sorted(report.failures.items()):
        lines += [
            "",
            f"{function}, {part}, {kind}: {failure.count} cases; {failure.text}",
            f"    {failure.shrunk}",
        ]
    return lines


def _counts(counter: Counter) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"
