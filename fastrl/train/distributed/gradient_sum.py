"""Backward passes whose gradients are added up over the ranks."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastrl.train.distributed import ranks
from fastrl.train.distributed.sharding import is_sharded, reshard
from fastrl.train.model.stored_model import fingerprint
from fastrl.train.packing import PackedBatch

# what torch 2.13 renamed
_SYNC_BUFFERS = {"forward_sync_buffers", "broadcast_buffers"}
_KNOWN = [*inspect.signature(DistributedDataParallel).parameters]
_NO_SYNC_OF_BUFFERS: dict[str, Any] = {max(_SYNC_BUFFERS.intersection(_KNOWN)): False}


class GradientSum:
    """Runs the backward of each micro-batch; after the last one, gradients are those of all ranks.

    The loss of a micro-batch has a global denominator, so that gradients are added up, not
    averaged. Sharded modules (FSDP2) do it by themselves in each backward, others through
    `DistributedDataParallel` in the last one.

    Args:
        modules: All that is trained.

    Raises:
        ValueError: Some of their weights are sharded and others are not.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.before_update()
        self._data_parallel: DistributedDataParallel | None = None
        self._added = 0
        trained = [p for module in modules for p in module.parameters() if p.requires_grad]
        split = {is_sharded(parameter) for parameter in trained}
        if len(split) > 1:
            raise ValueError("modules that are trained together must all be sharded, or none")
        if ranks.count() > 1 and split == {False}:
            self._data_parallel = DistributedDataParallel(
                _Trained(modules), gradient_as_bucket_view=True, **_NO_SYNC_OF_BUFFERS
            )
            self._data_parallel.register_comm_hook(None, self._add_up)
        self._trained = len({id(parameter) for parameter in trained})

    def backward(self, loss: Tensor, batch: PackedBatch) -> None:
        """The backward of a micro-batch's loss.

        Raises:
            ValueError: A trained weight has no gradient, so that the ranks cannot add it up.
        """
        if batch.repeated:
            loss = loss * 0
        adds_up = self._data_parallel is not None and batch.last
        if adds_up:
            self._added = 0
            assert self._data_parallel is not None
            self._data_parallel()  # its forward is what prepares it for one backward
        loss.backward()
        if adds_up and self._added != self._trained:
            raise ValueError(self._incomplete())

    def before_update(self) -> None:
        """To be called before the weights change."""
        for module in self._modules:
            reshard(module)

    def are_replicas_equal(self) -> bool:
        """Whether all ranks have the same bits where each has all weights."""
        if self._data_parallel is None:
            return True
        weights = self._data_parallel.named_parameters()
        return len(set(ranks.together(lambda: fingerprint(weights)))) == 1

    def _add_up(  # torch checks the types
        self,
        state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Add up a bucket of gradients; the hook of `DistributedDataParallel`, which averages."""
        self._added += len(bucket.parameters())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        added: torch.futures.Future[Tensor] = work.get_future().then(lambda f: f.value()[0])
        return added

    def _incomplete(self) -> str:
        without = [
            name
            for module in self._modules
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        return (
            "parallel must be fsdp for this model, or one rank: ddp needs a gradient for every "
            f"trained weight in each step, got none for {', '.join(map(repr, without[:3]))}"
        )


class _Trained(nn.Module):
    """Modules whose forward is called elsewhere."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self) -> Any:
        return None
