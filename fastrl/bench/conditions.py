"""How fast memory is while a case is timed on a CPU, and how much of the CPU others take.

Both vary, most of all on a virtual machine. Its host may move the cores to
where they share a path to memory: copies then take 1.6 times as long, for seconds or minutes, while
arithmetic takes the same, so that ratios change. Others are programs, and machines of that host.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import torch

ELEMENTS = 2**24  # of a copy, 128 MiB in all, which most caches do not hold
COPIES = 3  # of which the fastest counts: the first one may have to wake threads
LOOK = 2.0  # seconds in which the ceiling of the machine is found
COPY = "copy GB/s"
OTHERS = "taken by others"  # share of the cores' time
_IDLE = slice(3, 5)  # of the columns of /proc/stat, idle and waiting for a disk


class Conditions:
    """Copies between the rounds of a case, and the time of the cores that others took."""

    def __init__(self) -> None:
        self.source, self.target = torch.ones(ELEMENTS), torch.zeros(ELEMENTS)
        self.copies: list[float] = []
        self.before: tuple[float, float] | None = None

    def take(self) -> None:
        """Time a few copies; the first time, begin to count what others take."""
        self.before = self.before or _taken()
        seconds = []
        for _ in range(COPIES):
            begin = time.perf_counter()
            self.target.copy_(self.source)
            seconds.append(time.perf_counter() - begin)
        self.copies.append(2 * self.source.nbytes / min(seconds) / 1e9)

    def found(self) -> dict[str, float]:
        """Return the median GB/s of a copy, and where it is known the share of others."""
        found, now = {COPY: statistics.median(self.copies)}, _taken()
        if self.before is not None and now is not None:
            others, total = now[0] - self.before[0], now[1] - self.before[1]
            found[OTHERS] = max(0.0, others / max(total, 1))
        return found

    @classmethod
    def ceiling(cls) -> float:
        """Return the fastest copy of two seconds, GB/s."""
        begin, conditions = time.monotonic(), cls()
        while time.monotonic() - begin < LOOK:
            conditions.take()
        return max(conditions.copies)


def _taken() -> tuple[float, float] | None:
    """Return the ticks of all cores that others took, and all ticks; None where that is unknown."""
    try:
        line = Path("/proc/stat").read_text().split("\n", 1)[0]
        ticks = [int(one) for one in line.split()[1:9]]
    except (OSError, ValueError):
        return None
    if len(ticks) < 8:
        return None
    own = os.times()
    busy = sum(ticks) - sum(ticks[_IDLE])
    return busy - (own.user + own.system) * os.sysconf("SC_CLK_TCK"), sum(ticks)
