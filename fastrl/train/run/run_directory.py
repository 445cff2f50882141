"""The directory of a run: its name, its settings, and the lock of the process that uses it."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fastrl.train.config import LoopConfig
from fastrl.train.settings import file
from fastrl.train.settings.options import default_of
from fastrl.train.settings.rewards import reward_names

SETTINGS = "config.json"
_LOCK = ".lock"
# Settings of earlier versions that changed no result; a run that has them can be resumed.
_FORMER = {"micro_batch"}


def run_directory(config: LoopConfig, loop: str) -> Path:
    """``out_dir/name``; without a name ``loop-N``, with the next free N, or the last to resume."""
    root = Path(config.out_dir)
    if config.name is not None:
        return root / config.name
    marks = [SETTINGS] if config.resume else [SETTINGS, _LOCK]
    taken = [
        int(m[1])
        for path in root.glob(f"{loop}-*")
        if any((path / mark).exists() for mark in marks)
        and (m := re.fullmatch(rf"{loop}-(\d+)", path.name))
    ]
    return root / f"{loop}-{max(taken, default=0) + (0 if config.resume and taken else 1)}"


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a file, without those of earlier versions that changed no result.

    Raises:
        ValueError: The file cannot be read, or holds something else.
    """
    settings = file.read(path)
    if isinstance(settings.get("reward"), str):  # of earlier versions, which had one function
        settings["reward"] = list(reward_names(settings["reward"]))
    return {key: value for key, value in settings.items() if key not in _FORMER}


def settings_of(config: LoopConfig) -> dict[str, Any]:
    """The settings as `read_settings` returns them: what JSON makes of them."""
    settings = {key: value for key, value in asdict(config).items() if key != "resume"}
    return json.loads(json.dumps(settings))  # type: ignore[no-any-return]


def check_resumable(config: LoopConfig, before: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if ``config`` has another result than the run with settings ``before``.

    A setting that ``before`` lacks had its default.
    """
    now = settings_of(config)
    known = {f.name: f for f in fields(config)}
    if unknown := before.keys() - known.keys():
        raise ValueError(
            f"resume: the run has settings that this version does not have: "
            f"{', '.join(sorted(unknown))}"
        )
    # the task first: it is why others differ
    for name, f in sorted(known.items(), key=lambda item: item[0] != "task"):
        ends = name == "steps" and config.ends
        if f.metadata["result"] or ends:
            default = default_of(f, before.get("task"))
            then = before.get(name, json.loads(json.dumps(default)))
            why = f", since the schedule {config.schedule} depends on it" if ends else ""
            if now[name] != then:
                raise ValueError(
                    f"{name} must remain {then!r} when a run is resumed{why}, got {now[name]!r}"
                )


class RunLock:
    """A lock on the directory of a run, from now until `release` or the end of the process.

    The operating system releases it however the process ends.

    Args:
        directory: The run's, created if it does not exist.

    Raises:
        ValueError: Another process holds the lock, or the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._created = [path for path in directory.parents if not path.exists()]
        self._path = directory / _LOCK
        self._lock = FileLock(self._path, thread_local=False)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout as error:
            raise ValueError(f"name: {directory} is in use by another run") from error
        except OSError as error:
            self._remove_created()
            raise ValueError(f"out_dir: {directory} cannot be written: {error}") from error

    def release(self) -> None:
        """Remove the lock, and the directories that it created if they are empty."""
        if self._lock.is_locked:
            self._path.unlink(missing_ok=True)  # before another process can hold it
            self._lock.release()
            self._remove_created()

    def _remove_created(self) -> None:
        for path in (self._path.parent, *self._created):
            with suppress(OSError):  # not empty
                path.rmdir()
