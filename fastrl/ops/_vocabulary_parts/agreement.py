"""What the ranks of a split vocabulary tell each other before a call, and must agree on."""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.checks import is_sharded
from fastrl.contract import RowArguments
from fastrl.ops._process_groups import gathered
from fastrl.ops._vocabulary_parts.parts import WHOLE, VocabularyParts, group_named
from fastrl.tracing import is_traced


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
        given = self.advantages
        if not isinstance(given, Tensor) or is_sharded(given) or not given.is_floating_point():
            return None
        return given.detach()


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
    sizes, settings, tokens = zip(*exchanged.tolist(), strict=True)
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
    numbers = (ids.new_full((), x) for x in (size, crc32(options.encode())))
    own = torch.stack([*numbers, per_token])
    return gathered(own, group_named(group))


def _digest(values: Tensor) -> Tensor:
    """Return an integer that differs where values or places do, but for a coincidence."""
    flat = values.reshape(-1)
    bits = flat.double().view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)
    places = torch.arange(1, flat.shape[0] + 1, device=flat.device)
    mixed = bits + places * 0x1E3779B97F4A7C15  # the steps of splitmix64
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed.sum() + flat.shape[0]


def _uncompiled(*arguments: Any) -> Tensor:
    """Exchange without Dynamo, which may compile what a broken graph calls.

    What Inductor makes of the digest differs (torch 2.10) or crashes (2.13).
    """
    dynamo = sys.modules.get("torch._dynamo")
    run = _exchange_parts if dynamo is None else dynamo.disable(_exchange_parts)
    return cast("Tensor", run(*arguments))


torch.library.impl("fastrl::exchange_parts", "CompositeExplicitAutograd", _uncompiled)
