"""How long a run takes, roughly, before its first case."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fastrl.bench.case import Case
from fastrl.bench.conditions import COPY
from fastrl.bench.timing import LEAST_TIMED, Plan

START = 6.0  # seconds of a case for its process and its inputs
COMPILE = 15.0  # seconds that torch.compile needs for its first call
USUAL = 3.0  # the time of a call over the least that the machine could need
CHECKS = 5  # calls of a provider that are not timed


def seconds(cases: Sequence[Case], plan: Plan, ceilings: Mapping[str, float]) -> float:
    """Return about how long the cases take on a machine that has these ceilings."""
    gemms = ceilings.get("float32 GEMM TFLOP/s", math.inf) * 1e12
    copies = ceilings.get(COPY, math.inf) * 1e9
    total = 0.0
    for case in cases:
        call = USUAL * (case.flops / gemms + case.bytes_moved / copies)
        turns = 2 * plan.rounds * max(call, LEAST_TIMED)
        each = CHECKS * call + min(turns, max(plan.seconds, plan.least * call))
        compiled = sum(one.kind == "compile" for one in case.providers)
        total += START + len(case.providers) * each + COMPILE * compiled
    return total


def in_words(cases: Sequence[Case], plan: Plan, ceilings: Mapping[str, float], limit: float) -> str:
    """Return a line for the user about a run that may take ``limit`` seconds."""
    count = f"{len(cases)} case{'s' * (len(cases) != 1)}"
    if plan.hurried:
        return f"{count}, the most telling first, in at most {limit:.0f} seconds"
    about = seconds(cases, plan, ceilings)
    return (
        f"{count}: about {_time(about / 2)} to {_time(2 * about)}, longer beside other programs; "
        f"the run ends after {_time(limit)} (--seconds)"
    )


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"
