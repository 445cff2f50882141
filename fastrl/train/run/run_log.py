"""What a run writes besides checkpoints, for a person to watch: files, trackers, progress."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tqdm import tqdm

from fastrl.train.config import LoopConfig
from fastrl.train.model.stored_model import BASE, FINGERPRINT, REFERENCE, REWARD_MODEL
from fastrl.train.run import checkpoint
from fastrl.train.run.curves import draw
from fastrl.train.run.json_lines import append_rows, keep_until, read_rows, replace_file
from fastrl.train.run.progress import ProgressBar
from fastrl.train.run.report import write_report
from fastrl.train.run.run_directory import (
    SETTINGS,
    RunLock,
    check_resumable,
    read_settings,
    run_directory,
    settings_of,
)
from fastrl.train.run.samples import Samples
from fastrl.train.run.summary import MEASURED, Summary
from fastrl.train.run.terminal import printable
from fastrl.train.run.trackers import Trackers

__all__ = ["Row", "RunLog", "Summary"]

Row = dict[str, float]


class RunLog:
    """The files of one run, whose directory is locked until `close`.

    Args:
        config: Determines the directory, see `run_directory`.
        loop: The loop, such as ``"grpo"``: the first part of the name of an unnamed run.

    Attributes:
        rows: The rows of the log.
        samples: The completions that are shown.
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
        self.samples = Samples(config, self.directory, self.say)
        self._trackers = Trackers(config, self.directory, self.say)
        self._bar: ProgressBar | None = None
        self._loop = loop
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

    def checkpoint_to_resume(self) -> Path | None:
        """The last checkpoint of a run that is resumed; None if the run is to begin anew.

        Raises:
            ValueError: The run has a log, but no checkpoint.
            OSError: The checkpoints cannot be listed.
        """
        if not self.config.resume:
            return None
        last = checkpoint.latest(self.checkpoints)
        if last is None:
            if read_rows(self.metrics):  # the first checkpoint is older than the first row
                raise ValueError(
                    f"resume: {self.checkpoints} holds no checkpoint, but {self.metrics} has rows: "
                    "restore a checkpoint, or choose another --name"
                )
            self.say(f"{self.checkpoints} holds no checkpoint; the run begins anew")
        return last

    def begin(self, step: int) -> None:
        """Write the settings, and remove rows and samples after ``step`` from the log.

        Of a run that is new, ``step`` is -1.
        """
        self.rows = keep_until(self.metrics, step)
        self.samples.begin(step)
        if step < 0:
            (self.directory / REWARD_MODEL).unlink(missing_ok=True)  # of an attempt that was killed
        replace_file(self._settings, json.dumps(settings_of(self.config), indent=2) + "\n")

    @contextmanager
    def stage(self, name: str, steps: int) -> Iterator[Callable[[int, Row], None]]:
        """Show a bar for ``steps`` steps before the first one; yields what advances it."""
        bar = ProgressBar(name, steps) if steps else None
        try:
            yield bar.show if bar else (lambda done, row: None)
        finally:
            if bar:
                bar.close()

    def follow(self, step: int) -> None:
        """Show the bar of the run, of which ``step`` steps are done."""
        self._bar = ProgressBar(self.directory.name, self.config.steps, done=step)

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
        self.rows.append(row)
        append_rows(self.metrics, [row])
        self._trackers.write(self.rows)
        if self._bar is not None:
            if len(self.rows) == 1:
                self._bar.restart_clock()  # the first evaluation is no step
            self._bar.show(int(row["step"]), row)

    def say(self, line: str) -> None:
        """Print a line without breaking the bar; what is not printed by a terminal is escaped."""
        tqdm.write(printable(line, keep="\n"))

    def report(self) -> None:
        """Write ``report.html``."""
        path = self.directory / "report.html"
        with self._unless_it_fails(path, "written"):
            write_report(path, self._loop, self.config, self.rows, self.samples)

    def finish(self, *, failed: bool = False) -> None:
        """Close the bar, draw the curves, write the report, and complete the trackers.

        What of it fails is said; it must not hide what ended the run.

        Args:
            failed: Whether an error ended the run.
        """
        if self._bar is not None:
            self._bar.close()
        path = self.directory / "curves.png"
        with self._unless_it_fails(path, "drawn"):
            draw(self.rows, path)
        self.report()
        self._trackers.close(failed=failed)

    @contextmanager
    def _unless_it_fails(self, path: Path, done: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a plot must not end a run
            self.say(f"{path} could not be {done}: {type(error).__name__}: {error}")

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Discard the run if an error ends it here, before its first checkpoint."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """If no step was logged or saved, remove what the run wrote."""
        try:
            if self.rows or checkpoint.latest(self.checkpoints) is not None:
                return
        except OSError:  # there may be checkpoints
            return
        data = self.directory / "data"
        files = [self.directory / name for name in (FINGERPRINT, REWARD_MODEL)]
        for path in (self._settings, self.metrics, *files, *self.written):
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
        for key, name in MEASURED.items():
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
        elif (last := checkpoint.latest(self.checkpoints)) is not None:
            raise ValueError(
                f"name: {self.directory} has no {SETTINGS}, but holds {last.name} of another run; "
                "choose another --name"
            )
