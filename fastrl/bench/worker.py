"""The processes of a run that use the device: they make jobs and write each result at once.

    fastrl.bench.worker SETTINGS OUT PACKAGE UNTIL JOB ...

A process ends when a provider has cost it the GPU, and on a CPU after its first job; the runner
starts another one for what is left. No job starts after ``UNTIL``, of the monotonic clock.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fastrl.bench.case import Case
from fastrl.bench.child import check_package
from fastrl.bench.conditions import Conditions
from fastrl.bench.journal import CEILINGS, Journal
from fastrl.bench.machine import ceilings
from fastrl.bench.report import Row, record
from fastrl.bench.settings import Settings
from fastrl.bench.timing import LATE, ContextLostError, Measured, measure


def main(arguments: list[str]) -> int:
    """Make the jobs; the exit status is 1 if the process cannot go on."""
    text, out, package, end, *jobs = arguments
    check_package(package)
    settings, journal, parent = Settings.from_json(text), Journal(Path(out)), os.getppid()
    device = torch.device(settings.device)
    cases = {case.name: case for case in settings.cases()}
    for number, job in enumerate(jobs if settings.together else jobs[:1]):
        if time.monotonic() > float(end) or os.getppid() != parent:
            return 0
        until = settings.plan.until(float(end), len(jobs) - number)
        journal.append(job=job, started=time.time())
        try:
            if job == CEILINGS:
                journal.append(job=job, result=ceilings(device, tiny=settings.tiny))
            else:
                # a case keeps inputs and copies of them, which the next one must not find in use
                journal.append(
                    job=job, **_measured(cases.pop(job), device, settings, journal, until)
                )
        except ContextLostError as lost:
            journal.append(job=job, lost=lost.provider, why=lost.why)
            return 1
        except Exception as failure:
            journal.append(job=job, failure=f"{type(failure).__name__}: {str(failure)[:400]}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


def _measured(
    case: Case, device: torch.device, settings: Settings, journal: Journal, until: float
) -> dict[str, Any]:
    """Return the entry of a case: its ``result``, or what time allowed as its last ``partial``."""

    def trying(provider: str) -> None:
        journal.append(job=case.name, trying=provider)

    def so_far(found: list[Measured]) -> None:
        journal.append(job=case.name, partial=row(found))

    def row(found: list[Measured]) -> Row:
        kept = case.described() | {"device": device.type}
        if conditions is not None:
            kept |= conditions.found()
        return record(kept, [dataclasses.asdict(one) for one in found])

    conditions = None if device.type == "cuda" or settings.tiny else Conditions()
    left_out = journal.left_out(case.name)
    found = measure(
        case, device, settings.plan, left_out, trying, conditions, until=until, so_far=so_far
    )
    if any(one.failure == LATE for one in found):
        return {"partial": row(found), "cut": True}
    return {"result": row(found)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
