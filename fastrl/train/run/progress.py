"""The progress bar of a run, or lines where there is no terminal, with the numbers of a step."""

import os
import shutil
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from fastrl.train.run.terminal import printable, shortened

#: The key in the log, its name on the bar, its digits; the most important first.
_SHOWN = (
    ("reward", "reward", 3),
    ("held_out_reward", "held_out", 3),
    ("loss", "loss", 3),
    ("reward_std", "std", 2),
    ("accuracy", "accuracy", 3),
    ("held_out_accuracy", "held_out", 3),
    ("kl", "kl", 2),
    ("kl_old", "kl_old", 2),
    ("entropy", "entropy", 2),
    ("clip_fraction", "clip", 2),
    ("learning_rate", "lr", 2),
    ("tokens_per_second", "tok/s", 3),
)
_BAR = 8  # columns
_TIME = 7  # columns of 1:23:45
_LINES = 20  # how many lines a run prints without a terminal
_SILENT = 300.0  # seconds without a line after which one is printed nevertheless


class ProgressBar:
    """A line on standard error that fits the terminal; without one, a few lines.

    The lines come after each twentieth of the way, and after five minutes without one.

    Args:
        name: What runs.
        total: How many steps it has.
        done: How many of them are done.
    """

    def __init__(self, name: str, total: int, *, done: int = 0) -> None:
        self._name = shortened(printable(name), 20)
        self._total = total
        self._on_terminal = sys.stderr.isatty()
        self._printed, self._printed_at = done, time.monotonic()
        columns = f"{self._name} {total}/{total} |{'':{_BAR}}| , "
        self._fixed = len(columns) + 2 * _TIME + 1
        escaped = self._name.replace("{", "{{").replace("}", "}}")
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=not self._on_terminal,
            ncols=_columns(),
            bar_format=f"{escaped} {{n_fmt}}/{{total_fmt}} |{{bar:{_BAR}}}| "
            "{elapsed}<{remaining}{postfix}",
        )

    def restart_clock(self) -> None:
        """Leave out of the speed what came before the first step."""
        self._bar.unpause()

    def show(self, done: int, row: Mapping[str, float]) -> None:
        """Advance to ``done`` steps, with what `on_bar` shows of ``row``."""
        values = [f"{name}={value}" for name, value in on_bar(row).items()]
        if self._on_terminal:
            self._bar.ncols, self._bar.n = _columns(), done
            self._bar.set_postfix_str(fitting(values, self._bar.ncols - self._fixed))
            return
        step = max(1, -(-self._total // _LINES))
        late = time.monotonic() - self._printed_at >= _SILENT
        if done == self._total or done // step > self._printed // step or late:
            sys.stderr.write(f"{self._name} {done}/{self._total} {' '.join(values)}\n")
            sys.stderr.flush()
            self._printed, self._printed_at = done, time.monotonic()

    def close(self) -> None:
        """Leave the line as it is."""
        self._bar.close()


def fitting(values: list[str], room: int) -> str:
    """As many of the first values as ``room`` columns hold."""
    while values and len(" ".join(values)) > room:
        values = values[:-1]
    return " ".join(values)


def on_bar(row: Mapping[str, float]) -> dict[str, str]:
    """What the bar shows of a row of the log, if there is room.

    Besides losses and rewards: the phase that takes the longest, with its share of all phases, and
    the largest of their memory peaks in GB (1e9 bytes).
    """
    hidden = "kl_old" if "kl" in row else "kl"
    shown = {
        name: _short(row[key], digits)
        for key, name, digits in _SHOWN
        if key in row and key != hidden
    }
    seconds = {key: value for key, value in row.items() if key.startswith("seconds_")}
    if total := sum(seconds.values()):
        longest = max(seconds, key=lambda key: seconds[key])
        shown[longest.removeprefix("seconds_")] = f"{seconds[longest] / total:.0%}"
    peaks = [value for key, value in row.items() if key.startswith("peak_gb_")]
    if peaks:
        shown["GB"] = _short(max(peaks), 3)
    return shown


def _columns() -> int:
    """The width of the terminal now; 80 if it does not tell."""
    try:
        of_terminal = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # none, or a stream that only says it is one
        of_terminal = 0
    return of_terminal or shutil.get_terminal_size().columns


def _short(value: float, digits: int) -> str:
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.{digits}g}"
