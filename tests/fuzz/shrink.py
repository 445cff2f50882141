"""Makes a failing case simpler while it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .case import SIMPLEST, Case

MOST_TRIALS = 600


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the simplest case found that still fails."""
    trials, better = 0, True
    while better:
        better = False
        for candidate in _simpler(case):
            trials += 1
            if trials > MOST_TRIALS:
                return case
            if fails(candidate):
                case, better = candidate, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Yield cases with one thing less: the largest steps first."""
    if case.wrong is not None:
        return
    names = [name for name in case.options if name != "seed"]
    for name in names:
        yield case.changed(**{name: SIMPLEST[name]})
    for name in names:
        for value in _parts(case.options[name]):
            yield case.changed(**{name: value})
    if case.seed > 9:
        yield from (case.changed(seed=seed) for seed in range(10))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list) and len(value) > 1:
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
    elif isinstance(value, dict):
        for key in value:
            yield {other: value[other] for other in value if other != key}
        for key, inner in value.items():
            yield from ({**value, key: part} for part in _parts(inner))
    elif isinstance(value, int) and not isinstance(value, bool) and value > 2:
        yield from (smaller for smaller in (2, 3, value // 2, value - 1) if smaller < value)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from ([part] for part in _parts(value[0]))
