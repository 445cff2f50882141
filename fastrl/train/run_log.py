"""The files of a run besides its checkpoints, in its locked directory, and its output."""

import json
import math
import random
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from tqdm import tqdm

from fastrl.train.checkpoint import latest, replace_file
from fastrl.train.config import FREE, RunConfig
from fastrl.train.prompts import Prompt
from fastrl.train.report import Row, printable, write_report
from fastrl.train.trackers import Trackers

SETTINGS = "config.json"
_BEGUN_WITH = "began-with.json"
_LOCK = ".lock"
_SHOWN = {  # on the bar, by importance
    "reward": "reward",
    "held_out_reward": "held_out",
    "loss": "loss",
    "divergence": "divergence",
    "kl": "kl",
    "kl_old": "kl_old",
    "entropy": "entropy",
    "clip_fraction": "clip",
    "learning_rate": "lr",
    "tokens_per_second": "tok/s",
}
_REPORT_SECONDS = 60.0  # least time between two reports


class Summary(NamedTuple):
    """How a run ended."""

    directory: Path
    step: int
    held_out: tuple[float, float]  # rewards before the first step, and at the last evaluation
    interrupted: bool

    def __str__(self) -> str:
        """Return the final lines of output."""
        before, after = self.held_out
        lines = [
            f"held-out reward, greedy: {before:.3f} before, {after:.3f} after step {self.step}"
            if not math.isnan(after)
            else f"finished step {self.step}"
        ]
        if self.interrupted:
            resume = shlex.join(["--resume", "--out", str(self.directory)])
            lines = [f"stopped after step {self.step}; continue with {resume}"]
        return printable("\n".join([*lines, f"report: {self.directory / 'report.html'}"]), "\n")


class RunLog:
    """The files of one run, whose directory is locked until `close`."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.directory = config, _directory(config)
        self.checkpoints = self.directory / "checkpoints"
        self.rows: list[Row] = []
        self.samples: list[dict[str, Any]] = []
        self._collected: list[dict[str, Any]] = []
        self._begun: dict[str, Any] = {}
        self._bar: _Progress | None = None
        self._reported = time.monotonic()
        self._trackers: Trackers | None = None
        if config.resume:
            self._check_settings()
        self._lock = FileLock(self.directory / _LOCK, thread_local=False)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout as error:
            raise ValueError(f"out: {self.directory} is in use by another run") from error
        except OSError as error:
            raise ValueError(f"out: {self.directory} cannot be written: {error}") from error
        if not config.resume and ((self.directory / SETTINGS).exists() or latest(self.checkpoints)):
            self.close()
            raise ValueError(
                f"out: {self.directory} already contains a run; resume it with --resume, or choose "
                "another directory"
            )

    def checkpoint_to_resume(self) -> Path | None:
        """Return the last checkpoint of a resumed run; None if the run starts at step 0."""
        if not self.config.resume:
            return None
        last = latest(self.checkpoints)
        if last is None:
            if self._read("metrics.jsonl"):  # the first checkpoint is older than the first row
                raise ValueError(f"resume: {self.directory} has metrics, but no checkpoint")
            self.say(f"{self.checkpoints} holds no checkpoint; the run begins anew")
        elif (path := self.directory / _BEGUN_WITH).exists():
            self._begun = _read_object(path)
        return last

    def begun_with(self, **sums: str | None) -> None:
        """Record checksums of the run's inputs; raise a `ValueError` if they have changed."""
        for name, value in sums.items():
            if self._begun.setdefault(name, value) != value:
                raise ValueError(
                    f"resume: {name} has changed since the run began; restore it, or begin a new "
                    "run: data and weights must remain the same"
                )

    def begin(self, step: int) -> None:
        """Write the settings, and remove rows and samples after ``step``; -1 if the run is new."""
        self._begun.setdefault("id", uuid.uuid4().hex[:12])
        self.rows = self._keep("metrics.jsonl", step)
        for sample in self._keep("samples.jsonl", step):
            self._remember(sample)
        for name, values in ((SETTINGS, self.config.to_json()), (_BEGUN_WITH, self._begun)):
            replace_file(self.directory / name, json.dumps(values, indent=2) + "\n")
        self._trackers = Trackers(self.config, self.directory, self._begun["id"], self.say)

    @contextmanager
    def stage(self, name: str, steps: int) -> Iterator[Callable[[int, Row], None]]:
        """Show a bar for ``steps`` steps before the first one; yield the function to advance it."""
        self._bar = _Progress(name, steps)
        try:
            yield self._bar.show
        finally:
            self._bar.close()

    def follow(self, step: int) -> None:
        """Show the bar of the run, with ``step`` steps done."""
        self._bar = _Progress(printable(self.directory.name), self.config.steps, done=step)

    def write(self, row: Row) -> None:
        """Append a row and the collected samples; advance the bar."""
        self.rows.append(row)
        self._append("metrics.jsonl", [row])
        if self._trackers is not None:
            self._trackers.write(row)
        if self._bar is not None:
            self._bar.show(int(row["step"]), row)
        collected, self._collected = self._collected, []
        chosen = _chosen(collected, f"{self.config.seed} {row['step']}")
        for sample in chosen:
            self._remember(sample)
            self.say(_line(sample))
        if chosen:
            self._append("samples.jsonl", chosen)

    def rewrite(self, row: Row) -> None:
        """Replace the last row."""
        self.rows[-1] = row
        replace_file(self.directory / "metrics.jsonl", _lines(self.rows))

    def collect(
        self,
        step: int,
        prompts: Sequence[Prompt],
        completions: Sequence[str | None],
        rewards: Mapping[str, Any],
    ) -> None:
        """Collect completions of ``step``, if it shows samples: every second evaluation does.

        A NaN stands for no reward. The record's answer, if any, is shown beside the completion.
        """
        if step % (2 * self.config.eval_every):
            return
        values = {
            name: [None if math.isnan(number) else number for number in part.tolist()]
            for name, part in rewards.items()
        }
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            if completion is None:
                continue
            parts = {name: numbers[i] for name, numbers in values.items()}
            sample = {"step": step, "prompt": prompt.text, "completion": completion}
            if "answer" in prompt.record:
                sample["answer"] = str(prompt.record["answer"])
            self._collected.append({**sample, "reward": parts.pop("reward"), "parts": parts})

    def say(self, line: str) -> None:
        """Print a line without breaking the bar, with escapes for unprintable characters."""
        tqdm.write(printable(line, keep="\n"))

    def report(self, *, always: bool = False) -> None:
        """Write ``report.html`` and ``curves.png`` if the last versions are a minute old."""
        if not always and time.monotonic() - self._reported < _REPORT_SECONDS:
            return
        try:
            write_report(self.directory, self.config, self.rows, self.samples)
        except Exception as error:  # a plot must not end a run
            self.say(f"no report could be written: {type(error).__name__}: {error}")
        self._reported = time.monotonic()

    def finish(self, *, failed: bool) -> None:
        """Close the bar, write the report, and complete the trackers."""
        if self._bar is not None:
            self._bar.close()
        self.report(always=True)
        if self._trackers is not None:
            self._trackers.close(failed=failed)

    def close(self) -> None:
        """Let other processes use the directory, and remove it if it is new and empty."""
        if self._lock.is_locked:
            (self.directory / _LOCK).unlink(missing_ok=True)  # before another process can hold it
            self._lock.release()
            with suppress(OSError):  # not empty
                self.directory.rmdir()

    def summary(self, step: int, *, interrupted: bool) -> Summary:
        """Return how the run ended, from its log."""
        measured = [row["held_out_reward"] for row in self.rows if "held_out_reward" in row]
        before, after = (measured[0], measured[-1]) if measured else (math.nan, math.nan)
        return Summary(self.directory, step, (before, after), interrupted)

    def _check_settings(self) -> None:
        before, now = read_settings(self.directory), self.config.to_json()
        if before.keys() != now.keys():
            names = ", ".join(sorted(before.keys() ^ now.keys()))
            raise ValueError(f"resume: the run has other settings than this version: {names}")
        if isinstance(was := before["chat_template"], bool):  # of an earlier version
            before["chat_template"] = [] if was else None
        for name in now.keys() - FREE:
            if now[name] != before[name]:
                raise ValueError(
                    f"{name} must remain {before[name]!r} when a run is resumed, got {now[name]!r}"
                )

    def _remember(self, sample: dict[str, Any]) -> None:
        self.samples = [*self.samples, sample][-30:]

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            with (self.directory / name).open("a") as file:
                file.write(_lines(rows))
        except OSError as error:
            raise OSError(f"{name} could not be written: {error.strerror}") from error

    def _keep(self, name: str, step: int) -> list[dict[str, Any]]:
        """Remove the rows after ``step``, and return the others."""
        kept = [row for row in self._read(name) if row["step"] <= step]
        if (self.directory / name).exists():
            replace_file(self.directory / name, _lines(kept))
        return kept

    def _read(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a file, if it exists, without a line that an interruption cut."""
        path = self.directory / name
        rows = []
        *lines, _ = path.read_text(errors="replace").split("\n") if path.exists() else [""]
        for number, line in enumerate(lines, 1):
            if (row := _row(line)) is None:
                self.say(f"{path} line {number} is damaged; the run continues without it")
            else:
                rows.append(row)
        return rows


def read_settings(directory: Path) -> dict[str, Any]:
    """Return the settings of the run in a directory; raise a `ValueError` if there are none."""
    if not (directory / SETTINGS).exists():
        raise ValueError(f"resume: {directory} contains no run")
    return _read_object(directory / SETTINGS)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"resume: {path} cannot be read: {error}") from error


def last_run(loop: str) -> Path:
    """Return the unnamed run of a loop with the highest number, or ``runs/LOOP-1``."""
    return Path("runs", f"{loop}-{max([1, *_numbers(loop, SETTINGS)])}")


def _directory(config: RunConfig) -> Path:
    if config.out is not None:
        return Path(config.out)
    if config.resume:
        return last_run(config.loop)
    taken = [*_numbers(config.loop, SETTINGS), *_numbers(config.loop, _LOCK)]
    return Path("runs", f"{config.loop}-{max([0, *taken]) + 1}")


def _numbers(loop: str, mark: str) -> list[int]:
    """Return the numbers N of the directories ``runs/LOOP-N`` with a file ``mark``."""
    names = [path.parent.name for path in Path("runs").glob(f"{loop}-*/{mark}")]
    numbers = [name.removeprefix(f"{loop}-") for name in names]
    return [int(number) for number in numbers if number.isdecimal()]


class _Progress:
    """A bar on a terminal; elsewhere a line per twentieth of the way, or every five minutes."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self._name, self._total, self._printed = name, total, time.monotonic()
        self._bar = tqdm(
            desc=name,
            total=total,
            initial=done,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            bar_format="{desc} {n_fmt}/{total_fmt} |{bar:8}| {elapsed}<{remaining} {postfix}",
        )

    def show(self, done: int, row: Row) -> None:
        shown = " ".join(f"{name}={row[key]:.3g}" for key, name in _SHOWN.items() if key in row)
        due = done % max(1, -(-self._total // 20)) == 0 or done == self._total
        if not self._bar.disable:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(done - self._bar.n)
        elif due or time.monotonic() - self._printed > 300:
            sys.stderr.write(f"{self._name} {done}/{self._total} {shown}\n")
            sys.stderr.flush()
            self._printed = time.monotonic()

    def close(self) -> None:
        self._bar.close()


def _chosen(collected: list[dict[str, Any]], seed: str) -> list[dict[str, Any]]:
    """Return the best sample, the worst, and a random one that depends only on the seed.

    The random one may be without a reward.
    """
    rewarded = [sample for sample in collected if sample["reward"] is not None]
    order = sorted(rewarded, key=lambda sample: -sample["reward"])
    ends = [*zip(("best", "worst"), (order[:1] + order[1:][-1:]), strict=False)]
    others = order[1:-1] + [sample for sample in collected if sample["reward"] is None]
    drawn = [("random", random.Random(seed).choice(others))] if others else []
    return [{**sample, "chosen": why} for why, sample in (*ends, *drawn)]


def _line(sample: Mapping[str, Any]) -> str:
    """Return a sample as a line for the screen."""
    parts = "".join(f" {name} {_number(value)}" for name, value in sample["parts"].items())
    asked, answer = (
        text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"
        for text, most in ((repr(sample["prompt"]), 60), (repr(sample["completion"]), 160))
    )
    head = f"step {sample['step']} {sample['chosen']} {_number(sample['reward'])}{parts}"
    return f"{head}: {asked} -> {answer}"


def _number(value: float | None) -> str:
    return "no reward" if value is None else f"{value:.3g}"


def _row(line: str) -> dict[str, Any] | None:
    """Return the row in a line, or None if it is damaged."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    numbers = isinstance(row, dict) and isinstance(row.get("held_out_reward", 0.0), (int, float))
    return row if numbers and isinstance(row.get("step"), int) else None


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
