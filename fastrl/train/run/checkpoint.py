"""Checkpoints that hold everything the next step depends on, written atomically.

``checkpoints/step-000050/`` is a model that `transformers` loads, plus ``state.pt``: the optimizer,
further modules, the random generators and the step. The order of the prompts is a function of seed
and step. ``checksums.json`` holds the sums of all its files. What FSDP2 shards of the optimizer is
in a directory of its own, ``optimizer/``. So any number of ranks may continue, sharded or not.
"""

import os
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fastrl.train.distributed import optimizer_shards, ranks
from fastrl.train.distributed.sharding import load_whole_state, sharded_like, whole_state
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

    The first rank writes what is whole. All ranks must call this together if weights are sharded.

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
    weights = whole_state(model)
    states, shards = _states(parts)
    written = _Contents(step, model, tokenizer, weights, {"step": step, "rng": rng, **states})
    try:
        if ranks.from_first(lambda: _begin(final)):
            ranks.from_first(lambda: _write_whole(_partial(final), written, shards))
            for name, tensors in shards.items():
                optimizer_shards.write(_partial(final) / name, tensors)
            ranks.from_first(lambda: _complete(final))
    except BaseException as error:
        if ranks.is_first():  # on a full disk its space is needed
            shutil.rmtree(_partial(final), ignore_errors=True)
        own = isinstance(error, CheckpointError) or not isinstance(error, Exception)
        if own or ranks.is_of_exchange(error):
            raise
        raise CheckpointError(f"{final} could not be written: {_cause(error)}") from error
    ranks.from_first(lambda: _delete(_all(directory)[:-keep]))
    return final


class _Contents(NamedTuple):
    """What the first rank writes."""

    step: int
    model: Any
    tokenizer: Any
    weights: dict[str, Tensor] | None  # of the model, if it is sharded
    state: dict[str, Any]


def _states(parts: Mapping[str, Stateful]) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The states of the parts, and their sharded tensors by the name of their part."""
    states: dict[str, Any] = {}
    shards: dict[str, dict[str, Tensor]] = {}
    for name, part in parts.items():
        whole = whole_state(part) if isinstance(part, nn.Module) else None
        state = part.state_dict() if whole is None else whole
        if isinstance(part, torch.optim.Optimizer):
            state, tensors = optimizer_shards.split(state)
            shards |= {name: tensors} if tensors else {}
        states[name] = state
    return states, shards


def _begin(final: Path) -> bool:
    """Remove what a kill left, also in a removal; whether the checkpoint is not there yet."""
    for stale in final.parent.glob(_partial(final.with_name("step-*")).name):
        shutil.rmtree(stale)
    return not final.exists()


def _write_whole(partial: Path, contents: _Contents, directories: Iterable[str]) -> None:
    partial.mkdir(parents=True)
    contents.model.save_pretrained(
        partial, **({} if contents.weights is None else {"state_dict": contents.weights})
    )
    contents.tokenizer.save_pretrained(partial)
    with (partial / _STATE).open("wb") as file:  # torch reports no cause when it opens the file
        torch.save(contents.state, file)
    for name in directories:
        (partial / name).mkdir()


def _complete(final: Path) -> None:
    partial = _partial(final)
    checksums.write(partial)
    for path in (*partial.rglob("*"), partial):
        sync(path)
    os.replace(partial, final)
    sync(final.parent)


def _delete(checkpoints: Iterable[Path]) -> None:
    for old in checkpoints:
        os.replace(old, _partial(old))  # a kill in the middle leaves nothing that looks whole
        shutil.rmtree(_partial(old))


def latest(directory: Path) -> Path | None:
    """The latest checkpoint, or None.

    Raises:
        OSError: The directory cannot be read.
    """
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
            _load(part, state[name], checkpoint / name)
        set_rng_state(state["rng"])
    return int(state["step"])


def _load(part: Stateful, state: Any, shards: Path) -> None:
    """Load a state that is whole, or in part in the directory ``shards``, sharded as ``part``."""
    if isinstance(part, nn.Module):
        load_whole_state(part, state)
        return
    if isinstance(part, torch.optim.Optimizer) and isinstance(state.get("state"), dict):
        parameters = [p for group in part.param_groups for p in group["params"]]
        if shards.is_dir():
            state = optimizer_shards.read(shards, state, parameters)
        state = {**state, "state": _sharded(state["state"], parameters)}
    part.load_state_dict(state)


def _sharded(state: dict[int, dict[str, Any]], parameters: list[Any]) -> dict[int, dict[str, Any]]:
    """The whole tensors per parameter, such as moments, sharded as the parameter is."""
    return {
        index: {
            name: sharded_like(value, parameters[index])
            if isinstance(value, Tensor) and value.shape == parameters[index].shape
            else value
            for name, value in of_parameter.items()
        }
        for index, of_parameter in state.items()
    }


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
        if ranks.is_of_exchange(error):
            raise
        others = _all(checkpoint.parent)[:-1]
        advice = "delete it to resume from the previous one" if others else "there is no other one"
        raise ValueError(
            f"resume: {checkpoint} cannot be read; {advice} ({type(error).__name__}: {error})"
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
    try:
        names = os.listdir(directory)  # a glob takes what cannot be read for empty
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = {m[1]: directory / name for name in names if (m := _NAME.fullmatch(name))}
    return [found[step] for step in sorted(found, key=int)]
