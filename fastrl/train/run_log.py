"""The files of a run besides its checkpoints, in its locked directory, and its output."""

import json
import math
import random
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from tqdm import tqdm

from fastrl.train.checkpoint import latest, replace_file
from fastrl.train.config import FREE, RunConfig
from fastrl.train.prompts import Prompt
from fastrl.train.records import Records, Row
from fastrl.train.report import printable, write_report
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
        self.metrics = Records(self.directory / "metrics.jsonl", self.say)
        self.samples = Records(self.directory / "samples.jsonl", self.say)
        self._collected: list[dict[str, Any]] = []
        self._begun: dict[str, Any] = {}
        self._bar: _Progress | None = None
        self._reported = time.monotonic()
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
            if self.metrics.read():  # the first checkpoint is older than the first row
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
        self.metrics.keep(step)
        self.samples.keep(step)
        self._begun.setdefault("id", uuid.uuid4().hex[:12])  # of the run, for trackers
        for name, values in ((SETTINGS, self.config.to_json()), (_BEGUN_WITH, self._begun)):
            replace_file(self.directory / name, json.dumps(values, indent=2) + "\n")
        self._trackers = Trackers(self.config, self.directory, self._begun["id"], self.say)

    @cached_property
    def _trackers(self) -> Trackers:
        return Trackers(self.config, self.directory, self._begun.get("id", ""), self.say)

    @contextmanager
    def following(self, name: str, steps: int, done: int = 0) -> Iterator[None]:
        """Show a bar of ``steps`` steps, of which some are done."""
        self._bar = _Progress(printable(name), steps, done)
        with closing(self._bar):
            yield

    def show(self, step: int, row: Row) -> None:
        """Advance the bar to a step, and show its numbers."""
        if self._bar is not None:
            self._bar.show(step, row)

    def write(self, row: Row) -> None:
        """Append a row and the collected samples, which the bar and the trackers show, too."""
        self.metrics.add(row)
        self._trackers.write(row)
        self.show(int(row["step"]), row)
        collected, self._collected = self._collected, []
        if chosen := _chosen(collected, f"{self.config.seed} {row['step']}"):
            self.samples.add(*chosen)
        for sample in chosen:
            self.say(_line(sample))

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
            write_report(self.directory, self.config, self.metrics.rows, self.samples.rows)
        except Exception as error:  # a plot must not end a run
            self.say(f"no report could be written: {type(error).__name__}: {error}")
        self._reported = time.monotonic()

    def finish(self, *, failed: bool) -> None:
        """Write the report, and complete the trackers."""
        self.report(always=True)
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
        rows = self.metrics.rows
        measured = [row["held_out_reward"] for row in rows if "held_out_reward" in row]
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
    return Path("runs", f"{loop}-{_highest(loop, SETTINGS) or 1}")


def _directory(config: RunConfig) -> Path:
    if config.out is not None:
        return Path(config.out)
    if config.resume:
        return last_run(config.loop)
    taken = max(_highest(config.loop, SETTINGS), _highest(config.loop, _LOCK))
    return Path("runs", f"{config.loop}-{taken + 1}")


def _highest(loop: str, mark: str) -> int:
    """Return the highest N of the directories ``runs/LOOP-N`` with a file ``mark``, or 0."""
    names = [path.parent.name for path in Path("runs").glob(f"{loop}-*/{mark}")]
    numbers = [name.removeprefix(f"{loop}-") for name in names]
    return max([0, *(int(number) for number in numbers if number.isdecimal())])


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
