"""What a run measures, and the processes of it that use the device."""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from fastrl.bench.case import Case, Size
from fastrl.bench.cases import cases
from fastrl.bench.child import say
from fastrl.bench.conditions import Conditions
from fastrl.bench.machine import CEILINGS, ceilings
from fastrl.bench.report import Row, record
from fastrl.bench.timing import LATE, ContextLostError, Measured, Plan, measure

Lost = Mapping[str, Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sizes of a run, the passes and providers of each, and how often they are called."""

    sizes: tuple[Size, ...]
    steps: tuple[str, ...]
    device: str
    plan: Plan
    backends: tuple[str, ...] | None = None  # None: all that are available
    peers: tuple[str, ...] | None = None  # None: all that are installed
    tiny: bool = False  # whether even the machine's ceilings are measured on tiny sizes
    sparing: bool = False  # of torch's forms, see `cases`

    def cases(self) -> list[Case]:
        """Build the cases; their inputs are made when their turn comes."""
        device = torch.device(self.device)
        return cases(
            self.sizes, self.steps, device, self.backends, self.peers, sparing=self.sparing
        )


def work(settings: Settings, end: float, jobs: list[str], lost: Lost) -> None:
    """Make jobs, the names of cases or the ceilings of the machine, and say each result at once.

    On a CPU it makes the first alone: a heap with holes would raise the peaks of the next case.
    It ends when a provider has cost it the GPU; the runner starts another process for what is left.

    Args:
        settings: Of the run.
        end: No job starts after it, of the monotonic clock.
        jobs: What is left.
        lost: Per job the providers that ended an earlier process, and why; they are not called.
    """
    device = torch.device(settings.device)
    together = device.type == "cuda" or settings.tiny
    made = {case.name: case for case in settings.cases()}
    for number, job in enumerate(jobs if together else jobs[:1]):
        if time.monotonic() > end:
            return
        say(job=job)
        try:
            if job == CEILINGS:
                found: dict[str, Any] = {"result": ceilings(device, tiny=settings.tiny)}
            else:
                # a case keeps inputs and copies of them, which the next one must not find in use
                until = settings.plan.until(end, len(jobs) - number)
                found = _measured(made.pop(job), settings, lost.get(job, {}), until)
        except ContextLostError as failure:
            say(job=job, lost=failure.provider, why=failure.why)
            sys.exit(1)
        except Exception as failure:
            found = {"failure": f"{type(failure).__name__}: {str(failure)[:400]}"}
        say(job=job, **found)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(
    case: Case, settings: Settings, lost: Mapping[str, str], until: float
) -> dict[str, Any]:
    """Return the ``result`` of a case, or as ``partial`` what time allowed of it."""
    device = torch.device(settings.device)
    conditions = None if device.type == "cuda" or settings.tiny else Conditions()

    def row(found: list[Measured]) -> Row:
        kept = case.described() | {"device": device.type}
        if conditions is not None:
            kept |= conditions.found()
        return record(kept, [dataclasses.asdict(one) for one in found])

    found = measure(
        case,
        device,
        settings.plan,
        lost,
        lambda provider: say(job=case.name, trying=provider),
        conditions,
        until=until,
        so_far=lambda found: say(job=case.name, partial=row(found)),
    )
    if any(one.failure == LATE for one in found):
        return {"partial": row(found), "cut": True}
    return {"result": row(found)}
