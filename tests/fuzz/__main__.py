"""Runs random cases, or a pasted one: python -m tests.fuzz "Case('gae', tokens=3)"."""

import argparse
import os
import sys

from tests.calls.case import parse
from tests.calls.examine import BACKENDS, FUNCTIONS
from tests.ptx import backends

from .run import MOST_IN_DOUBT, Run
from .supervise import supervised


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("case", nargs="?", help="a line that a run printed")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--backend", default="cpu", choices=BACKENDS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--function", choices=FUNCTIONS, help="one function instead of all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-shrink", action="store_true")
    given = parser.parse_args()
    run = Run(
        given.cases,
        given.seed,
        given.first,
        given.backend,
        given.device,
        shrink=not given.no_shrink,
        function=given.function,
    )
    if run.executed:
        backends.use(run.backend, dict.__setitem__, setattr)
    if given.case is not None:
        verdict = run.examine(parse(given.case))
        say(*verdict.differences, f"{len(verdict.differences)} parts differ")
        say(f"in doubt: {dict(verdict.doubts)}")
        return 1 if verdict.differences else 0
    report = supervised(run, given.jobs)
    say(report)
    if run.function is None and report.share_in_doubt > MOST_IN_DOUBT:
        say(f"more than {MOST_IN_DOUBT:.0%} of the cases have something in doubt")
        return 1
    return 1 if report.failures else 0


def say(*lines: object) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


sys.exit(main())
