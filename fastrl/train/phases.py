"""Time and peak memory of each phase of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch


class Phases:
    """A measurement of the phases of a step, each of which may be entered several times.

    Peak memory includes everything in use, also the weights: on a GPU the memory that torch has
    allocated, on a CPU the process's resident memory, which only Linux reports. The end of a phase
    waits for the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._row: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block as the phase ``name``."""
        _reset_peak(self._device)
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            seconds = time.perf_counter() - begin
            key, peak_key, peak = f"seconds_{name}", f"peak_gb_{name}", _peak(self._device)
            self._row[key] = self._row.get(key, 0.0) + seconds
            if peak is not None:
                self._row[peak_key] = max(peak / 1e9, self._row.get(peak_key, 0.0))

    def read(self) -> dict[str, float]:
        """Return ``seconds_NAME`` and ``peak_gb_NAME`` (1e9 bytes) since the last call."""
        row, self._row = self._row, {}
        return row


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark


def _peak(device: torch.device) -> int | None:
    """Return the peak in bytes since the last reset; None if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "cpu":
        with suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    return None
