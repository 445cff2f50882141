"""The files of a run, ``config.json``, ``metrics.jsonl``, ``curves.png``, and a progress bar."""

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from fastrl.train.config import LoopConfig
from fastrl.train.model.stored_model import BASE, FINGERPRINT, REFERENCE
from fastrl.train.run.curves import draw
from fastrl.train.run.progress import on_bar
from fastrl.train.run.run_directory import (
    SETTINGS,
    RunLock,
    check_resumable,
    read_settings,
    run_directory,
    settings_of,
)

Row = dict[str, float]
#: What a loop measures on what is held out, by its key in the log.
_MEASURED = {
    "held_out_reward": "held-out reward, greedy",
    "held_out_accuracy": "held-out accuracy",
}


class Summary(NamedTuple):
    """How a run ended."""

    directory: Path
    step: int
    held_out: tuple[float, float] | None  # before the first step, and the last that was measured
    interrupted: bool
    evaluated: int = 0  # the step after which it was measured last
    measured: str = _MEASURED["held_out_reward"]  # what was measured

    def __str__(self) -> str:
        """The final lines of output."""
        lines = []
        if self.interrupted and not (self.directory / SETTINGS).exists():
            lines.append("stopped in the warm start: nothing was saved")
        elif self.interrupted:
            options = ["--resume", "--name", self.directory.name]
            if self.directory.parent != Path(LoopConfig.out_dir):
                options += ["--out_dir", str(self.directory.parent)]
            lines.append(f"stopped after step {self.step}; continue with {shlex.join(options)}")
        if self.held_out is not None:
            before, after = self.held_out
            then = f", {after:.3f} after {self.evaluated} steps" if self.evaluated else ""
            lines.append(f"{self.measured}: {before:.3f} before{then}")
        curves = self.directory / "curves.png"
        return "\n".join([*lines, *([f"curves: {curves}"] if curves.exists() else [])])


class RunLog:
    """The files of one run, whose directory is locked until `close`.

    Args:
        config: Determines the directory, see `run_directory`.
        loop: The loop, such as ``"grpo"``: the first part of the name of an unnamed run.

    Attributes:
        rows: The rows of the log.
        written: Further files that the run wrote before its first step, which `discard` removes.

    Raises:
        ValueError: The directory contains a run and ``config.resume`` is off; or it is on and there
            is no run, or its settings differ; or another process uses the directory.
    """

    def __init__(self, config: LoopConfig, loop: str) -> None:
        self.config = config
        self.directory = run_directory(config, loop)
        self.checkpoints = self.directory / "checkpoints"
        self.rows: list[Row] = []
        self.written: list[Path] = []
        self._bar: Any = None
        for path in (self.directory, *self.directory.parents):
            if path.exists() and not path.is_dir():
                raise ValueError(f"out_dir must be a directory, but {path} is a file")
        if config.resume and not self._settings.exists():
            raise ValueError(f"resume: {self.directory} contains no run")
        self._lock = RunLock(self.directory)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def begin(self, step: int) -> None:
        """Write the settings, remove rows after ``step`` from the log, and show the bar."""
        if self.metrics.exists():
            lines = self.metrics.read_text().splitlines()
            self.rows = [
                row for row in map(_parse, lines) if row is not None and row["step"] <= step
            ]
        _replace(self.metrics, "".join(json.dumps(row) + "\n" for row in self.rows))
        _replace(self._settings, json.dumps(settings_of(self.config), indent=2) + "\n")
        self._bar = tqdm(
            total=self.config.steps, initial=step, desc=self.directory.name, unit="step"
        )

    @property
    def metrics(self) -> Path:
        """``metrics.jsonl``, one row per step."""
        return self.directory / "metrics.jsonl"

    @property
    def _settings(self) -> Path:
        return self.directory / SETTINGS

    def write(self, row: Row) -> None:
        """Append a row and advance the bar.

        Raises:
            OSError: The row could not be written.
        """
        if not self.rows:
            self._bar.unpause()  # the warm start does not count as step time
        self.rows.append(row)
        _append(self.metrics, json.dumps(row) + "\n")
        self._bar.n = int(row["step"])
        self._bar.set_postfix(on_bar(row))

    def say(self, line: str) -> None:
        """Print a line without breaking the bar."""
        tqdm.write(line)

    def finish(self) -> None:
        """Close the bar and draw the curves; if they cannot be drawn, say so."""
        self._bar.close()
        path = self.directory / "curves.png"
        try:
            draw(self.rows, path)
        except Exception as error:  # whatever ends the run must not be hidden by a plot
            self.say(f"{path} could not be drawn: {type(error).__name__}: {error}")

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Discard the run if an error ends it here, before its first checkpoint."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Close the bar; if no step was logged or saved, remove what the run wrote."""
        if self._bar is not None:
            self._bar.close()
        if self.rows or any(self.checkpoints.glob("step-*")):
            return
        data = self.directory / "data"
        written = [self._settings, self.metrics, self.directory / FINGERPRINT, *self.written]
        for path in written:
            path.unlink(missing_ok=True)
        for name in (REFERENCE, BASE):
            shutil.rmtree(self.directory / name, ignore_errors=True)
        for directory in (data, self.checkpoints):
            with suppress(OSError):  # it does not exist, or holds other files
                directory.rmdir()

    def close(self) -> None:
        """Let other processes use the directory, and remove it if it is new and empty."""
        self._lock.release()

    def summary(self, step: int, *, interrupted: bool) -> Summary:
        """How the run ended, from its log."""
        for key, name in _MEASURED.items():
            if measured := [row for row in self.rows if key in row]:
                first, last = measured[0], measured[-1]
                ends, after = (first[key], last[key]), int(last["step"])
                return Summary(self.directory, step, ends, interrupted, after, name)
        return Summary(self.directory, step, None, interrupted)

    def _check(self) -> None:
        if self.config.resume:
            check_resumable(self.config, read_settings(self._settings))
        elif self._settings.exists():
            raise ValueError(
                f"name: {self.directory} already contains a run; "
                "resume it with --resume or choose another --name"
            )


def _parse(line: str) -> Row | None:
    """A row, or None if an interruption truncated the line."""
    try:
        return json.loads(line)  # type: ignore[no-any-return]
    except json.JSONDecodeError:
        return None


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a") as file:
            file.write(text)
    except OSError as error:
        raise OSError(f"{path} could not be written: {error.strerror}") from error


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise OSError(f"{path} could not be written: {error.strerror}") from error
