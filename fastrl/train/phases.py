"""What each phase of a step takes: seconds, and the largest amount of memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch


class Phases:
    """Measures the phases of a step, which may be entered several times.

    A phase inside another one interrupts it, so that the seconds add up. Memory is all that is in
    use at the phase's worst moment, weights included: of a GPU what torch has allocated on it, of a
    CPU the process's resident memory, which only Linux tells.

    Nothing waits for a GPU in a phase: the seconds are between two events on its current stream.

    Args:
        device: Where the work of the phases runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: Any = (_CudaClock if device.type == "cuda" else _HostClock)(device)
        self._device = device
        self._entered: list[str] = []
        self._last: Any = None
        self._spans: list[tuple[str, Any, Any]] = []  # of which phase, from when, until when
        self._peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count what happens inside as the phase ``name``."""
        self._turn()
        self._entered.append(name)
        try:
            yield
        finally:
            self._turn()
            self._entered.pop()

    def read(self) -> dict[str, float]:
        """The phases since the last call; those that are not over count with the next.

        Returns:
            ``seconds_NAME`` for each phase: their sum, if it was entered several times. And
            ``peak_gb_NAME``, in units of 1e9 bytes: the largest peak; absent where it is unknown.
        """
        row: dict[str, float] = {}
        for name, begin, end in self._spans:
            key = f"seconds_{name}"
            row[key] = row.get(key, 0.0) + self._clock.seconds(begin, end)
        row |= {f"peak_gb_{name}": peak / 1e9 for name, peak in self._peaks.items()}
        self._spans, self._peaks = [], {}
        return row

    def _turn(self) -> None:
        """End the current phase, if there is one, and begin to measure the next."""
        now = self._clock.now()
        if self._entered:
            name = self._entered[-1]
            self._spans.append((name, self._last, now))
            if (peak := _peak(self._device)) is not None:
                self._peaks[name] = max(peak, self._peaks.get(name, 0))
        _reset_peak(self._device)
        self._last = now


class _HostClock:
    """Waits for an accelerator, between the phases, that has no events."""

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device

    def now(self) -> float:
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class _CudaClock:
    """The time at which a stream arrives: after the work before, and not before the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark


def _peak(device: torch.device) -> int | None:
    """The bytes at the worst moment since the last reset; None if nothing tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "cpu":
        with suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    return None
