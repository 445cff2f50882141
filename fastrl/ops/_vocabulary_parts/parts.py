"""Which part of the vocabulary each rank of a process group has."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.checks import is_sharded
from fastrl.contract import RowArguments
from fastrl.tracing import is_traced

#: The name of a mesh dimension over which a DTensor with `Shard` is a part of the vocabulary; over
#: any other it is a shard of FSDP2, which is gathered.
TENSOR_PARALLEL = "tp"


class Agreed(NamedTuple):
    """What else must be the same on every rank, or they wait for each other, or results are wrong.

    Hidden states and log-probabilities of other policies must be, too; they are not compared.
    """

    options: tuple[object, ...]
    advantages: object = None

    def text(self, rows: RowArguments) -> str:
        """Return all options, without the addresses of functions among them."""
        scaling = (rows.temperature, rows.logit_scale, rows.logit_softcap)
        return re.sub(r" at 0x[0-9a-f]+", "", repr((scaling, *self.options)))

    def tensor(self) -> Tensor | None:
        """Return the advantages if they are a tensor; what else they may be is refused later."""
        is_tensor = isinstance(self.advantages, Tensor) and not is_sharded(self.advantages)
        return cast("Tensor", self.advantages).detach() if is_tensor else None


def _digest(values: Tensor) -> Tensor:
    """Return an integer that differs where values or places do, but for a coincidence."""
    flat = values.reshape(-1)
    bits = flat.double().view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)
    places = torch.arange(1, flat.shape[0] + 1, device=flat.device)
    mixed = bits + places * 0x1E3779B97F4A7C15  # the steps of splitmix64
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed.sum() + flat.shape[0]


class VocabularyParts(NamedTuple):
    """The parts of a vocabulary in rank order, as operators take them; no group: it is whole."""

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

    def start(self) -> int:
        """Return the id of the first token of this rank's part."""
        return sum(self.sizes[: self.rank])


WHOLE = VocabularyParts("", 0, [], True)


def group_named(name: str) -> dist.ProcessGroup:
    """Return a process group by its name, as operators take it."""
    module = cast("Any", dist.distributed_c10d)
    return cast("dist.ProcessGroup", module._resolve_process_group(name))


def group_of(
    name: str, value: object, vocab_group: object, *, dim: int
) -> dist.ProcessGroup | None:
    """Return the group over which a tensor is split in dimension `dim`, or None if it is whole.

    That is `vocab_group`, or the one of the mesh dimension `tp` over which a DTensor is sharded.

    Raises:
        TypeError: `vocab_group` is not a process group with this rank in it.
        ValueError: the tensor is a DTensor that is split in another way.
    """
    group = None
    if vocab_group is not None:
        if not (dist.is_available() and isinstance(vocab_group, dist.ProcessGroup)):
            raise TypeError(
                "vocab_group must be a torch.distributed.ProcessGroup that this rank belongs to, "
                f"or None, got {type(vocab_group).__name__}"
            )
        group = vocab_group
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
    """Return this rank's part of a DTensor, differentiable; anything else as it is."""
    return value.to_local() if is_sharded(value) else value


def vocabulary_parts(
    group: dist.ProcessGroup | None,
    size: int,
    rows: RowArguments,
    active: Tensor,
    agreed: Agreed,
    *,
    reduce_hidden_gradient: bool = True,
) -> VocabularyParts:
    """Exchange the sizes of the parts, and check what must be the same on every rank.

    Takes one collective of three integers, which the host waits for.

    Raises:
        ValueError: a part is empty, tokens or options differ between ranks, or the call is traced.
    """
    if group is None:
        return WHOLE
    ids = rows.token_ids
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="the ranks exchange the sizes of their parts")
    elif is_traced(ids) or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise ValueError(
            "vocab_group cannot be used in a trace or while a CUDA graph is captured: the ranks "
            "exchange the sizes of their parts, for which the host waits"
        )
    if dist.get_world_size(group) == 1 and size > 0:
        return WHOLE
    exchanged = torch.ops.fastrl.exchange_parts(
        torch.where(active, ids, -1),
        active,
        rows.temperatures,
        agreed.tensor(),
        size,
        agreed.text(rows),
        group.group_name,
        dist.get_world_size(group),
    )
    sizes, tokens, settings = zip(*exchanged.tolist(), strict=True)
    if len(set(tokens)) > 1:
        raise ValueError(
            "token_ids, mask, advantages and everything else per token must be the same on every "
            "rank of vocab_group, which splits the vocabulary and not the tokens; they differ"
        )
    if len(set(settings)) > 1:
        raise ValueError(
            "all ranks of vocab_group must make the same call: options, dtypes and which tensors "
            f"need a gradient differ; got {agreed.text(rows)} on this rank"
        )
    if 0 in sizes:
        raise ValueError(
            f"vocab_group: every rank needs at least one column of the vocabulary, got {[*sizes]}"
        )
    rank = dist.get_rank(group)
    return VocabularyParts(group.group_name, rank, [*sizes], reduce_hidden_gradient)


def gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the same tensor of every rank, `[R, ...]` in rank order."""
    gathered, work = start_gather(own, group)
    work.wait()
    return gathered


def start_gather(own: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Return where `gather` writes, and what to wait for; until then `own` must be kept."""
    gathered = own.new_empty((dist.get_world_size(group), *own.shape))
    work = dist.all_gather(list(gathered.unbind(0)), own, group=group, async_op=True)
    return gathered, cast("dist.Work", work)


def _exchange_parts(
    ids: Tensor,
    active: Tensor,
    temperatures: Tensor | None,
    advantages: Tensor | None,
    size: int,
    options: str,
    group: str,
    ranks: int,
) -> Tensor:
    per_token = _digest(ids)
    if temperatures is not None:
        per_token = per_token + 3 * _digest(torch.where(active, temperatures, 1.0))
    if advantages is not None:
        known = advantages.to(active.device)
        if known.numel() == active.numel():
            known = torch.where(active.reshape(known.shape), known, 0.0)
        per_token = per_token + 5 * _digest(known)
    own = torch.stack(
        [ids.new_full((), size), per_token, ids.new_full((), crc32(options.encode()))]
    )
    return gather(own, group_named(group))


torch.library.impl("fastrl::exchange_parts", "CompositeExplicitAutograd", _exchange_parts)
