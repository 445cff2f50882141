"""What a CPU can do while a case is timed: on a virtual machine that changes.

Its host may move the cores to where they share a path to memory. Copies then take 1.6 times as
long, for seconds or minutes, and arithmetic takes the same, so that ratios change, too. Or the host
gives the cores to other machines.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

ELEMENTS = 2**24  # of a copy, which caches do not hold
COPIES = 3  # of which the fastest counts: the first one may have to wake threads
LOOK = 2.0  # seconds in which the ceiling of the machine is found
COPY = "copy GB/s"
STOLEN = "stolen"  # share of the cores' time that the host gave to others


class Conditions:
    """Copies between the rounds of a case, and the time that the host took."""

    def __init__(self) -> None:
        self.source, self.target = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
        self.copies: list[float] = []
        self.before = _ticks()

    def take(self) -> None:
        """Time a few copies."""
        taken = []
        for _ in range(COPIES):
            begin = time.perf_counter()
            self.target.copy_(self.source)
            taken.append(time.perf_counter() - begin)
        self.copies.append(2 * self.source.nbytes / min(taken) / 1e9)

    def found(self) -> dict[str, float]:
        """Return the median GB/s of a copy and the share of stolen time."""
        stolen, total = (now - then for now, then in zip(_ticks(), self.before, strict=True))
        return {COPY: statistics.median(self.copies), STOLEN: stolen / max(total, 1)}

    @classmethod
    def ceiling(cls) -> float:
        """Return the fastest copy of two seconds, GB/s."""
        begin, conditions = time.monotonic(), cls()
        while time.monotonic() - begin < LOOK:
            conditions.take()
        return max(conditions.copies)


def _ticks() -> tuple[int, int]:
    """Return the stolen time of all cores and all time; 0 where that is unknown."""
    if not (status := Path("/proc/stat")).exists():
        return 0, 0
    ticks = [int(one) for one in status.read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[7], sum(ticks)
