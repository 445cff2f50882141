"""Directories of models that a run keeps besides its checkpoints, written atomically."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastrl.train.run import checksums

#: The folder of a run that keeps the weights below its adapter, if they are found nowhere else.
BASE = "base"
#: The folder that keeps the reference of the KL, if that is a copy.
REFERENCE = "reference"
#: The file that tells whether the weights below an adapter, kept elsewhere, are still the same.
FINGERPRINT = "base-fingerprint.json"
#: The file that tells which reward model the run began with.
REWARD_MODEL = "reward-model.json"
_VERSION = "2:"  # of the fingerprints


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
            sync(path)
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(directory.parent)


def verify(directory: Path) -> None:
    """Raise a `ValueError` if a stored directory is missing or damaged."""
    try:
        complete = checksums.verify(directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"resume: {directory} is damaged: {error}") from error
    if not complete and not (directory / "config.json").is_file():
        raise ValueError(f"resume: {directory} is missing")


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A sum of names, shapes and bits of weights, the same on every device.

    The bits are added up by row and by column, so that it also tells rows or columns that changed
    places.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(weights, key=lambda item: item[0]):
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize]
        bits = weight.detach().contiguous().view(kind)
        bits = bits.reshape(-1, max(1, bits.shape[-1] if bits.ndim else 1))
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype};".encode())
        for dim in (0, 1):
            digest.update(bits.sum(dim, dtype=torch.int64).cpu().numpy().tobytes())
    return f"{_VERSION}{digest.hexdigest()}"


def is_fingerprint(text: str) -> bool:
    """Whether `fingerprint` of this version may have returned ``text``."""
    return re.fullmatch(_VERSION + "[0-9a-f]{64}", text) is not None


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
