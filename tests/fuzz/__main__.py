"""Runs random cases, or a pasted one: python -m tests.fuzz "Case('gae', tokens=3)"."""

import argparse
import contextlib
import math
import os
import sys

from tests.calls.case import parse
from tests.calls.examine import BACKENDS, FUNCTIONS
from tests.gpu.device.pretended import Pretended, execute
from tests.ptx import backends

from .run import MOST_IN_DOUBT, PRETENDED, Run
from .supervise import supervised


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("case", nargs="?", help="a line that a run printed")
    of_table = "the rows of tests/calls/table.py, --cases of each, instead of drawn cases"
    parser.add_argument("--table", action="store_true", help=of_table)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit of the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--backend", default="cpu", choices=BACKENDS)
    of_device = "cpu, cuda, or pretended: kernels of GPUs, compiled for one and executed"
    parser.add_argument("--device", default="cpu", help=of_device)
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
        table=given.table,
        seconds=given.seconds,
    )
    if run.executed:
        use = execute if run.device == PRETENDED else backends.use
        use(run.backend, dict.__setitem__, setattr)
    with Pretended() if run.device == PRETENDED else contextlib.nullcontext():
        return report_of(run, given.case, given.jobs)


def report_of(run: Run, line: str | None, jobs: int) -> int:
    if line is not None:
        verdict = run.examine(parse(line))
        say(*verdict.differences, f"{len(verdict.differences)} parts differ")
        say(f"in doubt: {dict(verdict.doubts)}")
        return 1 if verdict.differences else 0
    report = supervised(run, jobs)
    say(report)
    if run.function is None and not run.table and report.share_in_doubt > MOST_IN_DOUBT:
        say(f"more than {MOST_IN_DOUBT:.0%} of the cases have something in doubt")
        return 1
    return 1 if report.failures or (run.table and report.left) else 0


def say(*lines: object) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


sys.exit(main())
