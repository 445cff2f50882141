"""Directories of models that a run keeps besides its checkpoints, written atomically."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastrl.train import checksums

#: The folder of a run that keeps the weights below its adapter, if they are found nowhere else.
BASE = "base"


def store(directory: Path, save: Callable[[Path], Any]) -> None:
    """Let ``save`` fill a directory, which gets its name when it is complete and on disk.

    Raises:
        OSError: It could not be written.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    for stale in (partial, directory):  # of a run that was killed before its first checkpoint
        shutil.rmtree(stale, ignore_errors=True)
    try:
        save(partial)
        checksums.write(partial)
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(directory.parent)


def verify(directory: Path) -> None:
    """Raise a `ValueError` if a stored directory is missing or damaged."""
    try:
        complete = checksums.verify(directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"resume: {directory} is damaged: {error}") from error
    if not complete and not (directory / "config.json").is_file():
        raise ValueError(f"resume: {directory} is missing")


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
