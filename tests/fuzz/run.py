"""Runs cases, shrinks failing ones, and collects statistics."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable

from .case import Case
from .compare import Difference
from .draw import draw
from .examine import examine, signature
from .shrink import shrunk

#: More than this share of cases with something in doubt, and a run says too little. About 11 of
#: 100 are drawn so: rows without a distribution and infinities on purpose, the rest on bounds.
MOST_IN_DOUBT = 0.2

Signature = tuple[str, str, str]


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

    cases: Counter = dataclasses.field(default_factory=Counter)  # by function
    refused: int = 0
    failing: int = 0
    in_doubt: int = 0
    doubtful_cases: Counter = dataclasses.field(default_factory=Counter)  # by kind
    decisions: Counter = dataclasses.field(default_factory=Counter)  # by kind
    failures: dict[Signature, Failure] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.cases.values())

    @property
    def share_in_doubt(self) -> float:
        return self.in_doubt / max(self.total, 1)

    def add(self, case: Case, refused: bool, doubts: Counter) -> None:
        self.cases[case.function] += 1
        self.refused += refused
        self.in_doubt += bool(doubts)
        self.decisions.update(doubts)
        self.doubtful_cases.update(doubts.keys())

    def merge(self, other: Report) -> None:
        for name in ("cases", "doubtful_cases", "decisions"):
            getattr(self, name).update(getattr(other, name))
        for name in ("refused", "failing", "in_doubt"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for kind, failure in other.failures.items():
            if kind in self.failures:
                self.failures[kind].count += failure.count
            else:
                self.failures[kind] = failure


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
    function: str | None = None  # None: any

    def case(self, index: int) -> Case:
        return draw(
            self.seed,
            index,
            self.function,
            float64=self.backend in ("reference", "auto"),
            interpreted=self.interpreted,
        )

    def indices(self) -> range:
        return range(self.first, self.first + self.cases)


def fails_as(kind: Signature, run: Run) -> Callable[[Case], bool]:
    """Return whether a case fails in the same way."""

    def fails(case: Case) -> bool:
        found = examine(case, run.backend, run.device).differences
        return any(signature(case, difference) == kind for difference in found)

    return fails


def perform(
    run: Run,
    known: Iterable[Signature] = (),
    before: Callable[[int], None] = lambda index: None,
) -> Report:
    """Run the cases; `before` hears the number of each; failures that are known are not shrunk."""
    report, started = Report(), time.monotonic()
    for index in run.indices():
        before(index)
        case = run.case(index)
        verdict = examine(case, run.backend, run.device)
        report.add(case, verdict.refused, verdict.doubts)
        if verdict.differences:
            report.failing += 1
            _note(report, case, verdict.differences[0], run, set(known))
    report.seconds = time.monotonic() - started
    return report


def _note(
    report: Report, case: Case, difference: Difference, run: Run, known: set[Signature]
) -> None:
    kind = signature(case, difference)
    if kind in report.failures:
        report.failures[kind].count += 1
        return
    small, text = case, str(difference)
    if run.shrink and kind not in known:
        small = shrunk(case, fails_as(kind, run))
        again = examine(small, run.backend, run.device).differences
        text = next((str(one) for one in again if signature(small, one) == kind), text)
    report.failures[kind] = Failure(case, small, text)


def lines_of(report: Report, run: Run) -> list[str]:
    """Return the results of a run as text."""
    lines = [
        f"{report.total} cases of seed {run.seed} on {run.backend} in {report.seconds:.0f} s: "
        f"{report.failing} failed in {len(report.failures)} ways, "
        f"{report.refused} were refused as they should be, "
        f"{report.in_doubt} have something in doubt ({report.share_in_doubt:.1%})",
        "  cases: " + _counts(report.cases),
        "  in doubt, cases: " + _counts(report.doubtful_cases),
        "  in doubt, decisions: " + _counts(report.decisions),
    ]
    for (function, part, kind), failure in sorted(report.failures.items()):
        lines += ["", f"{function}, {part}, {kind}: {failure.count} cases; {failure.text}"]
        lines += [f"    {failure.shrunk}"]
        if failure.found != failure.shrunk:
            lines += [f"    found as {failure.found}"]
    return lines


def _counts(counter: Counter) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"
