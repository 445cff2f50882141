"""The part of the vocabulary that each rank of a process group has."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch.distributed as dist

from fastrl.checks import is_sharded
from fastrl.ops._process_groups import checked_group

#: The name of a mesh dimension over which a DTensor with `Shard` is a part of the vocabulary; over
#: any other it is a shard of FSDP2, which is gathered.
TENSOR_PARALLEL = "tp"


class VocabularyParts(NamedTuple):
    """The parts of a vocabulary in rank order, for operators; without a group there is one part."""

    group: str  # the name of the process group
    rank: int  # of this process in it
    sizes: list[int]
    reduce_hidden_gradient: bool

    # methods, not properties: torch.compile in torch 2.10 cannot trace properties of a NamedTuple
    def split(self) -> bool:
        """Return whether there is more than one part."""
        return len(self.sizes) > 1

    def process_group(self) -> dist.ProcessGroup:
        """Return the process group."""
        return group_named(self.group)

    def total(self, own: int) -> int:
        """Return the size of the whole vocabulary, of which `own` columns are on this rank."""
        return sum(self.sizes) if self.split() else own

    def start(self) -> int:
        """Return the id of the first token of this rank's part."""
        return sum(self.sizes[: self.rank])


UNSPLIT = VocabularyParts("", 0, [], True)


def group_named(name: str) -> dist.ProcessGroup:
    """Return a process group by its name, which operators take."""
    module = cast("Any", dist.distributed_c10d)
    return cast("dist.ProcessGroup", module._resolve_process_group(name))


def group_of(
    name: str, value: object, vocab_group: object, *, dim: int
) -> dist.ProcessGroup | None:
    """Return the group over which a tensor is split in dimension `dim`, or None if it is whole.

    It is `vocab_group`, or the group of the mesh dimension `tp` over which a DTensor is sharded.

    Raises:
        TypeError: `vocab_group` is not a process group with this rank in it.
        ValueError: the tensor is a DTensor that is split in another way.
    """
    group = checked_group(vocab_group, "vocab_group")
    if not is_sharded(value):
        return group
    tensor = cast("Any", value)
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    dimension = tensor.dim() + dim if dim < 0 else dim
    in_parts = len(placements) == 1 and placements[0].is_shard(dimension)
    if group is None:
        named = tuple(mesh.mesh_dim_names or ()) == (TENSOR_PARALLEL,)
        return cast("dist.ProcessGroup", mesh.get_group()) if in_parts and named else None
    if not in_parts or _ranks(mesh.get_group()) != _ranks(group):
        raise ValueError(
            f"{name} must be a plain tensor or a DTensor with Shard({dimension}) over the ranks "
            f"{_ranks(group)} of vocab_group, got {placements} over {mesh}"
        )
    return group


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def local_part(value: Any) -> Any:
    """Return this rank's part of a DTensor, differentiable; return anything else unchanged."""
    return value.to_local() if is_sharded(value) else value
