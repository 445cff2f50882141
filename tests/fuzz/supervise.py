"""Runs cases in child processes, so that a crash or a hang is a failure like any other."""

import dataclasses
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.calls.case import Case
from tests.calls.examine import Verdict
from tests.calls.trial import Difference

from .run import Report, Run

#: Cases of one process; a child is forked, which costs little.
SHARE = 500
#: Seconds of a case, on a CPU and on a GPU, where a hang would take all of a short lease.
PATIENCE, PATIENCE_OF_GPU = 300, 90


@dataclasses.dataclass(eq=False)
class Child:
    """A process that examines cases, of which it sends the verdicts."""

    cases: list[Case]
    process: Any
    verdicts: Connection
    patience: float
    ended: bool = False
    heard: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def late(self) -> float:
        """When the process hangs if nothing is heard of it."""
        return self.heard + self.patience

    def next(self) -> Verdict:
        """Return the verdict of the next case, also if the process has crashed or hangs."""
        try:
            if self.verdicts.poll(max(self.late - time.monotonic(), 0)):
                verdict = self.verdicts.recv()
                self.heard = time.monotonic()
                return verdict
            kind, text = "hangs", f"no end after {self.patience} s"
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
    # a GPU cannot be used in a fork of a process that has asked for it
    context = multiprocessing.get_context("spawn" if run.on_gpu else "fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(run, list(cases), there))
    process.start()
    there.close()
    return Child(list(cases), process, here, PATIENCE_OF_GPU if run.on_gpu else PATIENCE)


def _work(run: Run, cases: list[Case], verdicts: Connection) -> None:
    if run.on_gpu:  # what is allocated holds NaN, not the last right answer
        warnings.filterwarnings("ignore", ".*eterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
    for case in cases:
        verdict = run.examine(case)
        if run.on_gpu:
            _still_there(case, verdict)
        verdicts.send(verdict)


def _still_there(case: Case, verdict: Verdict) -> None:
    """End the process if an error of the GPU would fail every later call of it, too."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        sys.stderr.write(f"{case}: {[*map(str, verdict.differences)]}, then {error}\n")
        sys.stderr.flush()
        os._exit(70)


def supervised(run: Run, jobs: int) -> Report:
    """Run the cases in this many parallel processes, until the time is over."""

    def apart(case: Case) -> Verdict:
        child = started(run, [case])
        verdict = child.next()
        child.end()
        return verdict

    report = Report(run)
    deadline = report.started + run.seconds
    cases = list(map(run.case, run.indices()))
    share = max(1, min(SHARE, -(-len(cases) // jobs)))
    waiting = [cases[i : i + share] for i in range(0, len(cases), share)]
    children: list[Child] = []
    while (waiting or children) and time.monotonic() < deadline:
        while waiting and len(children) < jobs:
            children.append(started(run, waiting.pop(0)))
        late = min([deadline, *(child.late for child in children)])
        ready = wait([child.verdicts for child in children], max(late - time.monotonic(), 0))
        hanging = [child for child in children if time.monotonic() > child.late]
        for child in [child for child in children if child.verdicts in ready or child in hanging]:
            report.add(child.cases.pop(0), child.next(), apart)
            if child.ended or not child.cases:
                child.end()
                children.remove(child)
                waiting = [child.cases, *waiting] if child.cases else waiting
    for child in children:
        child.end()
    report.left = sum(map(len, waiting)) + sum(len(child.cases) for child in children)
    return report
