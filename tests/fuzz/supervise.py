"""Runs cases in child processes, so that a crash of a kernel is a failure like any other."""

from __future__ import annotations

import dataclasses
import mmap
import multiprocessing
import signal
import struct
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from .case import Case
from .compare import Difference
from .examine import examine, signature
from .run import Failure, Report, Run, Signature, perform
from .shrink import shrunk

#: Cases of one process; a child is forked, which costs little.
SHARE = 500
_CONTEXT = multiprocessing.get_context("fork")


@dataclasses.dataclass
class Child:
    """A process, its cases, and the number of the current one."""

    run: Run
    process: Any
    answer: Connection
    at: mmap.mmap


def supervised(run: Run, jobs: int) -> Report:
    """Run the cases in this many parallel processes."""
    report, started = Report(), time.monotonic()
    waiting = [
        dataclasses.replace(run, first=first, cases=min(SHARE, run.first + run.cases - first))
        for first in range(run.first, run.first + run.cases, SHARE)
    ]
    children: list[Child] = []
    while waiting or children:
        while waiting and len(children) < jobs:
            children.append(_started(waiting.pop(0), tuple(report.failures)))
        ready = wait([child.answer for child in children])
        for child in [child for child in children if child.answer in ready]:
            children.remove(child)
            rest = _finished(child, report)
            if rest is not None:
                waiting.insert(0, rest)
    report.seconds = time.monotonic() - started
    return report


def _started(run: Run, known: tuple[Signature, ...]) -> Child:
    here, there = _CONTEXT.Pipe(duplex=False)
    at = mmap.mmap(-1, 8)
    at[:] = struct.pack("q", run.first)

    def work() -> None:
        def before(index: int) -> None:
            at[:] = struct.pack("q", index)

        there.send(perform(run, known, before))

    process = _CONTEXT.Process(target=work)
    process.start()
    there.close()
    return Child(run, process, here, at)


def _finished(child: Child, report: Report) -> Run | None:
    """Collect the results of a child; if it crashed, return its remaining cases."""
    run = child.run
    try:
        report.merge(child.answer.recv())
        child.process.join()
    except EOFError:
        child.process.join()
    else:
        return None
    index = struct.unpack("q", child.at[:])[0]
    before = dataclasses.replace(run, cases=index - run.first)
    report.merge(perform_apart(before, tuple(report.failures)))
    case = run.case(index)
    name = _name(child.process.exitcode)
    kind = signature(case, Difference("call", f"crashed with {name}", ""))
    if kind in report.failures:
        report.failures[kind].count += 1
    else:
        small = shrunk(case, lambda one: crash_of(one, run) == name) if run.shrink else case
        report.failures[kind] = Failure(case, small, f"the process ended with {name}")
    report.failing += 1
    report.cases[case.function] += 1
    return dataclasses.replace(run, first=index + 1, cases=run.first + run.cases - index - 1)


def perform_apart(run: Run, known: tuple[Signature, ...]) -> Report:
    """Run cases that are known to terminate in a separate process."""
    if run.cases == 0:
        return Report()
    child = _started(run, known)
    report = child.answer.recv()
    child.process.join()
    return report


def crash_of(case: Case, run: Run) -> str | None:
    """Return the signal that ends the process of a case, or None if it does not crash."""
    process = _CONTEXT.Process(target=examine, args=(case, run.backend, run.device))
    process.start()
    process.join()
    return _name(process.exitcode) if process.exitcode else None


def _name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"code {code}"
