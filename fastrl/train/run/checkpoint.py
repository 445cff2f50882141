"""Checkpoints that hold everything the next step depends on, written atomically.

``checkpoints/step-000050/`` is a model that `transformers` loads, plus ``state.pt``: the optimizer,
further modules, the random generators and the step. The order of the prompts is a function of seed
and step. ``checksums.json`` holds the sums of all its files.
"""

import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fastrl.train.model.stored_model import sync
from fastrl.train.run import checksums

_STATE = "state.pt"
_NAME = re.compile(r"step-(\d{6,})")


class CheckpointError(OSError):
    """A checkpoint could not be written; what was written of it is removed."""


class Stateful(Protocol):
    """What can be saved and restored: an optimizer, a module."""

    def state_dict(self) -> Any:  # noqa: D102
        ...

    def load_state_dict(self, state_dict: Any) -> Any:  # noqa: D102
        ...


def rng_state() -> dict[str, Any]:
    """The state of every generator that a step may use: torch's, Python's and NumPy's."""
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
        torch.cuda.set_rng_state(generator, device)  # the run may continue on fewer or more GPUs
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002


def seed_all(seed: int) -> None:
    """Seed the generators of `rng_state`."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def save(
    directory: Path,
    *,
    step: int,
    model: Any,
    tokenizer: Any,
    parts: Mapping[str, Stateful],
    rng: dict[str, Any],
    keep: int,
) -> Path:
    """Write ``directory/step-NNNNNN`` atomically, then delete all but the latest ``keep``.

    Args:
        directory: The run's directory of checkpoints.
        step: How many steps are done.
        model: Saved with ``save_pretrained``, as is the tokenizer.
        tokenizer: The model's.
        parts: Everything else with a ``state_dict``: the optimizer, a value head.
        rng: What `rng_state` returned before the next step.
        keep: How many checkpoints are kept.

    Raises:
        CheckpointError: A file could not be written. Earlier checkpoints are untouched.
    """
    final = directory / f"step-{step:06d}"
    partial = _partial(final)
    try:
        # left by a kill, also one in the removal after the last step's checkpoint
        for stale in directory.glob(_partial(directory / "step-*").name):
            shutil.rmtree(stale)
        if not final.exists():
            _write(partial, step=step, model=model, tokenizer=tokenizer, parts=parts, rng=rng)
            os.replace(partial, final)
            sync(directory)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk its space is needed
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(f"{final} could not be written: {_cause(error)}") from error
    for old in _all(directory)[:-keep]:
        os.replace(old, _partial(old))  # a kill in the middle leaves nothing that looks whole
        shutil.rmtree(_partial(old))
    return final


def _write(
    partial: Path,
    *,
    step: int,
    model: Any,
    tokenizer: Any,
    parts: Mapping[str, Stateful],
    rng: dict[str, Any],
) -> None:
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    state = {name: part.state_dict() for name, part in parts.items()}
    with (partial / _STATE).open("wb") as file:  # torch reports no cause when it opens the file
        torch.save({"step": step, "rng": rng, **state}, file)
    checksums.write(partial)
    for path in (*partial.rglob("*"), partial):
        sync(path)


def latest(directory: Path) -> Path | None:
    """The latest checkpoint, or None."""
    found = _all(directory)
    return found[-1] if found else None


def restore(checkpoint: Path, parts: Mapping[str, Stateful]) -> int:
    """Load ``parts`` and the generators; the model is loaded from its path like any other.

    Returns:
        How many steps were done.

    Raises:
        ValueError: The checkpoint is damaged.
    """
    with reading(checkpoint):
        state = torch.load(checkpoint / _STATE, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        set_rng_state(state["rng"])
    return int(state["step"])


def verify(checkpoint: Path) -> bool:
    """Check every file of a checkpoint against its checksum.

    Returns:
        Whether it has checksums. Those of earlier versions have none.

    Raises:
        ValueError: A file is damaged or missing.
    """
    with reading(checkpoint):
        return checksums.verify(checkpoint)


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Turn any error while a checkpoint is read into one that names it.

    Raises:
        ValueError: The checkpoint cannot be read.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the type depends on where the file is damaged
        raise ValueError(
            f"resume: {checkpoint} cannot be read; delete it to resume from the previous one "
            f"({type(error).__name__}: {error})"
        ) from error


def _cause(error: BaseException) -> str:
    """The system's error behind ``error``, such as a full disk, if there is one."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror
        behind = behind.__cause__ or behind.__context__
    return f"{type(error).__name__}: {error}"


def _partial(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.partial")


def _all(directory: Path) -> list[Path]:
    """The checkpoints by their step; all are whole, since they got their names at the end."""
    found = {m[1]: path for path in directory.glob("step-*") if (m := _NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found, key=int)]
