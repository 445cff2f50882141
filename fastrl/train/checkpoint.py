"""Checkpoints that hold all that the next step depends on, and are there whole or not at all.

``checkpoints/step-000050/`` is what `transformers` would load as a model, with ``state.pt`` beside
it: the optimizer, any further modules, the generators and the step. The order of the prompts
follows from seed and step.
"""

import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

_STATE = "state.pt"


class Stateful(Protocol):
    """An optimizer, a module: what can be saved and restored."""

    def state_dict(self) -> Any:  # noqa: D102
        ...

    def load_state_dict(self, state_dict: Any) -> Any:  # noqa: D102
        ...


def rng_state() -> dict[str, Any]:
    """The state of every generator that a step may draw from: torch's, Python's and NumPy's."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 -- reward functions may draw from it
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators back to what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002


def seed_all(seed: int) -> None:
    """Seed the same generators."""
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
    """Write ``directory/step-NNNNNN`` in one rename, then drop all but the latest ``keep``.

    Args:
        directory: Where the checkpoints of the run are.
        step: How many steps are done.
        model: Saved with ``save_pretrained``, as is the tokenizer.
        tokenizer: The model's.
        parts: Whatever else has a ``state_dict``: the optimizer, a value head.
        rng: What `rng_state` returned when the next step was about to begin.
        keep: How many checkpoints stay.
    """
    final = directory / f"step-{step:06d}"
    if final.exists():
        return final  # the same step of the same run
    partial = directory / f".{final.name}.partial"
    for stale in directory.glob(".step-*.partial"):
        shutil.rmtree(stale)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    state = {"step": step, "rng": rng, **{name: part.state_dict() for name, part in parts.items()}}
    torch.save(state, partial / _STATE)
    for path in (*partial.rglob("*"), partial):
        _sync(path)
    os.replace(partial, final)
    _sync(directory)
    for old in _all(directory)[:-keep]:
        shutil.rmtree(old)
    return final


def latest(directory: Path) -> Path | None:
    """The checkpoint of the most steps, if there is one."""
    found = _all(directory)
    return found[-1] if found else None


def restore(checkpoint: Path, parts: Mapping[str, Stateful]) -> int:
    """Load ``parts`` and the generators; the model is loaded by path like any other.

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


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Name the checkpoint in whatever goes wrong while it is read.

    Raises:
        ValueError: Something did.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        raise ValueError(
            f"resume: {checkpoint} cannot be read; delete it to go on from the one before "
            f"({type(error).__name__}: {error})"
        ) from error


def _sync(path: Path) -> None:
    """Have the disk hold what was written."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _all(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step-*") if (path / _STATE).is_file())
