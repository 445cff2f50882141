"""The files of a run, ``config.json``, ``metrics.jsonl``, ``curves.png``, and a progress bar."""

import json
import os
import re
import shlex
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from fastrl.train.config import RunConfig
from fastrl.train.curves import draw
from fastrl.train.progress import on_bar

Row = dict[str, float]
SETTINGS = "config.json"
_MAY_CHANGE = {"resume", "name", "out_dir", "steps", "save_every", "eval_every", "keep_checkpoints"}


class Summary(NamedTuple):
    """How a run ended."""

    directory: Path
    step: int
    held_out: tuple[float, float] | None  # before the first step, after the last
    interrupted: bool

    def __str__(self) -> str:
        """The final lines of output."""
        lines = []
        if self.interrupted and not (self.directory / SETTINGS).exists():
            lines.append("stopped in the warm start: nothing was saved")
        elif self.interrupted:
            options = ["--resume", "--name", self.directory.name]
            if self.directory.parent != Path(RunConfig.out_dir):
                options += ["--out_dir", str(self.directory.parent)]
            lines.append(f"stopped after step {self.step}; continue with {shlex.join(options)}")
        if self.held_out is not None:
            before, after = self.held_out
            lines.append(
                f"held-out reward, greedy: {before:.3f} before, {after:.3f} after {self.step} steps"
            )
        curves = self.directory / "curves.png"
        return "\n".join([*lines, *([f"curves: {curves}"] if curves.exists() else [])])


class RunLog:
    """The files of one run.

    Args:
        config: Determines the directory, see `run_directory`.
        loop: The loop, ``"grpo"`` or ``"ppo"``: the first part of the name of an unnamed run.

    Raises:
        ValueError: The directory contains a run and ``config.resume`` is off; or it is on and there
            is no run, or its settings differ.
    """

    def __init__(self, config: RunConfig, loop: str) -> None:
        self.config = config
        self.directory = run_directory(config, loop)
        self.checkpoints = self.directory / "checkpoints"
        self.rows: list[Row] = []
        self._bar: Any = None
        for path in (self.directory, *self.directory.parents):
            if path.exists() and not path.is_dir():
                raise ValueError(f"out_dir must be a directory, but {path} is a file")
        self._check()

    def begin(self, step: int) -> None:
        """Write the settings, remove rows after ``step`` from the log, and show the bar."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.metrics.exists():
            lines = self.metrics.read_text().splitlines()
            self.rows = [
                row for row in map(_parse, lines) if row is not None and row["step"] <= step
            ]
        _replace(self.metrics, "".join(json.dumps(row) + "\n" for row in self.rows))
        settings = {key: value for key, value in asdict(self.config).items() if key != "resume"}
        _replace(self._settings, json.dumps(settings, indent=2) + "\n")
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
        """Append a row and advance the bar."""
        if not self.rows:
            self._bar.unpause()  # the warm start does not count as step time
        self.rows.append(row)
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._bar.n = int(row["step"])
        self._bar.set_postfix(on_bar(row))

    def say(self, line: str) -> None:
        """Print a line without breaking the bar."""
        tqdm.write(line)

    def finish(self) -> Path:
        """Close the bar, draw the curves, and return their path."""
        self._bar.close()
        path = self.directory / "curves.png"
        draw(self.rows, path)
        return path

    def discard(self) -> None:
        """Close the bar; if no step was logged or saved, remove what `begin` wrote."""
        self._bar.close()
        if self.rows or self.checkpoints.exists():
            return
        data = self.directory / "data"
        written = [self._settings, self.metrics, data / "train.jsonl", data / "held_out.jsonl"]
        for path in written:
            path.unlink(missing_ok=True)
        for directory in (data, self.directory):
            with suppress(OSError):  # it does not exist, or holds other files
                directory.rmdir()

    def summary(self, step: int, *, interrupted: bool) -> Summary:
        """How the run ended, from its log."""
        held_out = [row["held_out_reward"] for row in self.rows if "held_out_reward" in row]
        ends = (held_out[0], held_out[-1]) if held_out else None
        return Summary(self.directory, step, ends, interrupted)

    def _check(self) -> None:
        if not self._settings.exists():
            if self.config.resume:
                raise ValueError(f"resume: {self.directory} contains no run")
            return
        if not self.config.resume:
            raise ValueError(
                f"name: {self.directory} already contains a run; "
                "resume it with --resume or choose another --name"
            )
        before = json.loads(self._settings.read_text())
        for key, value in asdict(self.config).items():
            if key not in _MAY_CHANGE and before.get(key) != value:
                raise ValueError(
                    f"{key} must remain {before.get(key)!r} when a run is resumed, got {value!r}"
                )


def run_directory(config: RunConfig, loop: str) -> Path:
    """``out_dir/name``; without a name ``loop-N``, with the next free N, or the last to resume."""
    root = Path(config.out_dir)
    if config.name is not None:
        return root / config.name
    taken = [
        int(m[1])
        for path in root.glob(f"{loop}-*")
        if (path / SETTINGS).exists() and (m := re.fullmatch(rf"{loop}-(\d+)", path.name))
    ]
    return root / f"{loop}-{max(taken, default=0) + (0 if config.resume and taken else 1)}"


def _parse(line: str) -> Row | None:
    """A row, or None if an interruption truncated the line."""
    try:
        return json.loads(line)  # type: ignore[no-any-return]
    except json.JSONDecodeError:
        return None


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)
