"""Runs cases in child processes, so that a crash or a hang is a failure like any other."""

import dataclasses
import multiprocessing
import signal
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.calls.case import Case
from tests.calls.examine import Verdict
from tests.calls.trial import Difference

from .run import Report, Run

#: Cases of one process; a child is forked, which costs little.
SHARE = 500
PATIENCE = 300  # seconds of a case
_CONTEXT = multiprocessing.get_context("fork")


@dataclasses.dataclass(eq=False)
class Child:
    """A process that examines cases, of which it sends the verdicts."""

    cases: list[Case]
    process: Any
    verdicts: Connection
    ended: bool = False
    heard: float = dataclasses.field(default_factory=time.monotonic)

    def next(self) -> Verdict:
        """Return the verdict of the next case, also if the process has crashed or hangs."""
        try:
            if self.verdicts.poll(max(self.heard + PATIENCE - time.monotonic(), 0)):
                verdict = self.verdicts.recv()
                self.heard = time.monotonic()
                return verdict
            kind, text = "hangs", f"no end after {PATIENCE} s"
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            name = signal.Signals(-code).name if code < 0 else f"code {code}"
            kind, text = f"crashed with {name}", f"the process ended with {name}"
        self.ended = True
        return Verdict([Difference("call", kind, text)], Counter())

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def started(run: Run, cases: list[Case]) -> Child:
    here, there = _CONTEXT.Pipe(duplex=False)

    def work() -> None:
        for case in cases:
            there.send(run.examine(case))

    process = _CONTEXT.Process(target=work)
    process.start()
    there.close()
    return Child(list(cases), process, here)


def supervised(run: Run, jobs: int) -> Report:
    """Run the cases in this many parallel processes."""

    def apart(case: Case) -> Verdict:
        child = started(run, [case])
        verdict = child.next()
        child.end()
        return verdict

    report = Report(run)
    indices = run.indices()
    waiting = [list(map(run.case, indices[i : i + SHARE])) for i in range(0, run.cases, SHARE)]
    children: list[Child] = []
    while waiting or children:
        while waiting and len(children) < jobs:
            children.append(started(run, waiting.pop(0)))
        late = min(child.heard for child in children) + PATIENCE
        ready = wait([child.verdicts for child in children], max(late - time.monotonic(), 0))
        hanging = [child for child in children if time.monotonic() > child.heard + PATIENCE]
        for child in [child for child in children if child.verdicts in ready or child in hanging]:
            report.add(child.cases.pop(0), child.next(), apart)
            if child.ended or not child.cases:
                child.end()
                children.remove(child)
                waiting = [child.cases, *waiting] if child.cases else waiting
    return report
