"""The sharded tensors of an optimizer on disk, each rank's in a file of its own.

`torch.distributed.checkpoint` writes and reads them, so that another number of ranks may continue.
Its format for `safetensors` is used: the default one keeps its index in a pickle.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fastrl.train.distributed import ranks
from fastrl.train.distributed.sharding import is_sharded

State = dict[str, Any]


def split(state: State) -> tuple[State, dict[str, Tensor]]:
    """What ``optimizer.state_dict()`` returns, without its sharded tensors, and these.

    Returns:
        The rest, and the sharded tensors by ``"<index of the parameter>.<name>"``.
    """
    if not isinstance(state.get("state"), dict):
        return state, {}
    shards = {
        f"{index}.{name}": value
        for index, of_parameter in state["state"].items()
        for name, value in of_parameter.items()
        if is_sharded(value)
    }
    rest = {
        index: {name: value for name, value in each.items() if f"{index}.{name}" not in shards}
        for index, each in state["state"].items()
    }
    return {**state, "state": rest}, shards


def write(directory: Path, shards: dict[str, Tensor]) -> None:
    """Write the shards into a directory that exists; all ranks must call this together.

    Raises:
        OSError: A rank could not write.
    """
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    with _first_failure(), warnings.catch_warnings():  # torch 2.10 warns of its own storages
        warnings.simplefilter("ignore", UserWarning)
        save(shards, storage_writer=writer)


def read(directory: Path, state: State, parameters: Iterable[Tensor]) -> State:
    """The state of an optimizer of ``parameters``, sharded as they are; all ranks call together.

    Args:
        directory: What `write` wrote, on any number of ranks.
        state: The rest that `split` returned.
        parameters: Those of the optimizer, in its order.
    """
    reader = HuggingFaceStorageReader(str(directory))
    stored = reader.read_metadata().state_dict_metadata
    of_index = list(parameters)
    tensors: dict[str, Tensor] = {}
    for name, entry in stored.items():
        assert isinstance(entry, TensorStorageMetadata)  # safetensors has nothing else
        parameter = of_index[int(name.partition(".")[0])].detach()
        if parameter.shape != entry.size:
            raise ValueError(
                f"{directory.name}: {name} must have shape {tuple(parameter.shape)}, got "
                f"{tuple(entry.size)}"
            )
        tensors[name] = torch.empty_like(parameter, dtype=entry.properties.dtype)
    with _first_failure(), warnings.catch_warnings():  # that there is one process
        warnings.simplefilter("ignore", UserWarning)
        load(tensors, storage_reader=reader, no_dist=ranks.count() == 1)
    merged = {index: dict(each) for index, each in state["state"].items()}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        merged.setdefault(int(index), {})[key] = tensor
    return {**state, "state": merged}


@contextmanager
def _first_failure() -> Iterator[None]:
    """Raise, on all ranks, what the first rank that failed raised; torch's is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        failed = min(error.failures)
        raise error.failures[failed][0] from None
