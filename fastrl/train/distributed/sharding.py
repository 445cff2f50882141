"""Weights sharded over the ranks with FSDP2, gathered where they are needed as a whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from fastrl.train.distributed import ranks
from fastrl.train.settings.ranks import RankSettings

Module = TypeVar("Module", bound=nn.Module)
_INSIDE = "forward_inside"


def sharded(module: Module, config: RankSettings, device: torch.device) -> Module:
    """The module on ``device``, its weights sharded in place if the settings say so.

    A layer's weights are gathered for its forward and for its backward, all others (embeddings,
    norm, head) for the forward and backward of the module. Gradients are added up over the ranks.
    """
    if ranks.count() == 1 or config.parallel != "fsdp":
        return module.to(device)
    mesh = init_device_mesh(device.type, (ranks.count(),))
    names = getattr(module, "_no_split_modules", None) or ()
    layers = [layer for layer in module.modules() if type(layer).__name__ in names]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for part in _sharded_modules(module):
        part.set_gradient_divide_factor(1.0)  # the loss has a global denominator
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    setattr(module, _INSIDE, MethodType(_inside, module))
    register_fsdp_forward_method(module, _INSIDE)
    return module


def inside(module: Any, run: Callable[[], Tensor]) -> Tensor:
    """``run()`` as if it were the module's forward.

    FSDP2 gathers weights, and prepares for the backward, around a forward alone. Afterwards weights
    outside the layers can be read until the backward is over, or until `reshard`.
    """
    forward = getattr(module, _INSIDE, None)
    return run() if forward is None else forward(run)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """All weights of the module on each rank, so that it runs without the other ranks."""
    parts = _sharded_modules(module)
    if not parts:
        yield
        return
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not module, recurse=False)
        reshard(module)


def reshard(module: nn.Module) -> None:
    """Drop gathered weights. Before the shards change: the gathered ones would stay as they are."""
    for part in _sharded_modules(module):
        part.reshard()


def is_sharded(tensor: Any) -> bool:
    """Whether each rank has only a part of a tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor; all ranks must call this together if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, other: Any) -> Tensor:
    """This rank's part of a tensor that all ranks have, sharded like another of its shape."""
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(
        tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None
    )


def whole_state(module: nn.Module) -> dict[str, Any] | None:
    """``module.state_dict()`` of whole tensors on the CPU, on the first rank; None if not sharded.

    All ranks must call this together.
    """
    if not _sharded_modules(module):
        return None
    seen: dict[int, Tensor] = {}  # tied weights are one tensor in the result as well
    state = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen[id(tensor)] = whole(tensor.detach()).cpu() if ranks.is_first() else whole(tensor)
        state[name] = seen[id(tensor)]
        if not ranks.is_first():
            seen[id(tensor)] = state[name] = torch.empty(0)
    return state


def load_whole_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Load a state of whole tensors, which all ranks have, into a module that may be sharded."""
    now = module.state_dict()
    module.load_state_dict({key: sharded_like(value, now[key]) for key, value in state.items()})


def _inside(module: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    return run()


def _sharded_modules(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
