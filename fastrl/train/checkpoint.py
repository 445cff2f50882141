"""Checkpoints, written atomically, with everything that the next step depends on.

``checkpoints/step-000050/`` is a model that `transformers` loads, plus ``state.pt``: the optimizer,
further modules, the random generators and the step. The order of the prompts is a function of seed
and step. ``checksums.json`` holds the SHA-256 sums of all its files.
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

CHECKSUMS = "checksums.json"
_STATE = "state.pt"
_NAME = re.compile(r"step-(\d{6,})")
_KEPT = 2  # the last one, and the one before it in case the last is damaged


class CheckpointError(OSError):
    """A checkpoint could not be written; the incomplete files are removed."""


class Stateful(Protocol):
    """An object with a state to save and restore: an optimizer, a module."""

    def state_dict(self) -> Any:  # noqa: D102
        ...

    def load_state_dict(self, state_dict: Any) -> Any:  # noqa: D102
        ...


def rng_state() -> dict[str, Any]:
    """Return the state of each generator that a step may use: torch's, Python's and NumPy's."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 -- reward functions may use it
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the generators to what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    for device, generator in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(generator, device)  # the run may continue on another machine
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the generators at the end of the block."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


def seed_all(seed: int) -> None:
    """Seed the generators of `rng_state`."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def save(
    directory: Path,
    *,
    step: int,
    model: Any,
    tokenizer: Any,
    parts: Mapping[str, Stateful],
    rng: dict[str, Any],
) -> None:
    """Write ``directory/step-NNNNNN`` atomically, unless it is there.

    All checkpoints except the last are deleted first, so that the disk needs room for two.
    """
    final = directory / f"step-{step:06d}"
    if final.exists():
        return
    states = {name: part.state_dict() for name, part in parts.items()}

    def write(partial: Path) -> None:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        with (partial / _STATE).open("wb") as file:  # torch reports no cause when it opens the file
            torch.save({"step": step, "rng": rng, **states}, file)

    try:
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.glob(_partial(directory / "step-*").name):
            shutil.rmtree(stale)  # left by a process that was killed
        for old in _all(directory)[: 1 - _KEPT]:
            os.replace(old, _partial(old))  # a kill in the middle leaves nothing that looks whole
            shutil.rmtree(_partial(old))
        store(final, write)
    except Exception as error:
        raise CheckpointError(f"{final} could not be written: {_cause(error)}") from error


def restore(checkpoint: Path, parts: Mapping[str, Stateful]) -> int:
    """Load ``parts`` and the generators; the model is loaded from its path like any other.

    Returns:
        The number of finished steps.
    """
    with reading(checkpoint):
        state = torch.load(checkpoint / _STATE, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        set_rng_state(state["rng"])
    return int(state["step"])


def latest(directory: Path) -> Path | None:
    """Return the latest checkpoint, or None."""
    found = _all(directory)
    return found[-1] if found else None


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Turn any error in reading a checkpoint into an error that names the checkpoint."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the type depends on where the file is damaged
        others = _all(checkpoint.parent)[:-1]
        advice = "delete it to resume from the previous one" if others else "there is no other one"
        raise ValueError(
            f"resume: {checkpoint} cannot be read; {advice} ({type(error).__name__}: {error})"
        ) from error


def store(directory: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a directory, and name it once it is complete and on disk."""
    partial = _partial(directory)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        sums = {path.relative_to(partial).as_posix(): _sum(path) for path in files}
        (partial / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        os.replace(partial, directory)
        _sync(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the space
        raise


def verify(directory: Path, *, as_model: bool = False) -> None:
    """Compare the files of a directory with their checksums."""
    recorded = directory / CHECKSUMS
    if as_model and not recorded.exists():
        return
    try:
        sums = dict(json.loads(recorded.read_text()))
        if as_model:
            sums.pop(_STATE, None)
        wrong = [name for name, expected in sums.items() if _sum(directory / name) != expected]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{directory} is damaged: {error}") from error
    if wrong:
        raise ValueError(f"{directory} is damaged: {wrong[0]} has another sum than in {CHECKSUMS}")


def fingerprint(model: Any) -> str:
    """Return the SHA-256 sum of names, shapes and bits of a model's weights."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype};".encode())
        bits = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(bits.numpy().tobytes())
    return digest.hexdigest()


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _cause(error: BaseException) -> str:
    """Return the system's error behind ``error``, such as a full disk, if there is one."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror
        behind = behind.__cause__ or behind.__context__
    return f"{type(error).__name__}: {error}"


def _partial(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.partial")


def _all(directory: Path) -> list[Path]:
    """Return the checkpoints by step; all are complete, since they are named at the end."""
    try:
        names = os.listdir(directory)  # a glob would treat an unreadable directory as empty
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = {m[1]: directory / name for name in names if (m := _NAME.fullmatch(name))}
    return [found[step] for step in sorted(found, key=int)]
