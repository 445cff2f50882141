"""The agreement of ranks that split a vocabulary on sizes and equal arguments, before a call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import ParamSpec, TypeVar, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.objective import as_objective
from fastrl.ops._process_groups import checked_group, gathered
from fastrl.ops._vocabulary_parts.descriptions import description_of
from fastrl.ops._vocabulary_parts.parts import UNSPLIT, VocabularyParts, group_of
from fastrl.ops._vocabulary_parts.samples import MOST as _MOST_SAMPLES
from fastrl.ops._vocabulary_parts.samples import samples
from fastrl.tracing import is_traced, is_transformed

P = ParamSpec("P")
R = TypeVar("R")

#: The dimension in which an argument is split; each rank has its own values.
_SPLIT = {"logits": -1, "weight": 0, "bias": 0, "lora": 0}
#: Arguments that ranks compute and may round differently; their values are not compared.
_COMPUTED = ("hidden",)
#: Arguments without a value per token or sequence, whatever their shapes.
_OF_NO_TOKEN = ("cu_seqlens", "kept", "normalizer")
_REFUSED = -1  # in place of the size of a part
_MOST = 32  # arguments; all functions send messages of one length


def ranks_agree(function: Callable[P, R]) -> Callable[P, R]:
    """Let all ranks of a split vocabulary make the same call, or raise on all of them.

    With a group, which may come from a DTensor, the function gets an `Agreement` as `vocab_group`,
    and must call its `parts` once all checks are done.
    """
    names = [*_signature(function).parameters]
    part = "logits" if "logits" in names else "weight"
    place = names.index(part)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if agreement_of(kwargs.get("vocab_group")) is not None:  # the caller has made it
            return function(*args, **kwargs)
        group = checked_group(kwargs.get("vocab_group"), "vocab_group")
        if group is None:
            given = kwargs[part] if part in kwargs else (*args, None, None)[place]
            group = group_of(part, given, None, dim=_SPLIT[part])
        if group is None:
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg="the ranks exchange the sizes of their parts")
        dynamo = sys.modules.get("torch._dynamo")
        run = _together if dynamo is None else dynamo.disable(_together)
        return cast("R", run(function, group, args, kwargs))

    return call


def agreement_of(vocab_group: object) -> Agreement | None:
    """Return the `Agreement` that a function of `ranks_agree` got as `vocab_group`, or None."""
    return vocab_group if isinstance(vocab_group, Agreement) else None


def _together(
    function: Callable[..., R],
    group: dist.ProcessGroup,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> R:
    agreement = Agreement(group, function, args, kwargs)
    try:
        agreement.refuse_traces()
        return function(*args, **{**kwargs, "vocab_group": agreement})
    except Exception:
        agreement.refuse()
        raise


class Agreement:
    """A call that the ranks of a split vocabulary make together."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> None:
        """Describe the call of `function` with `args` and `kwargs`."""
        self.group, self.args, self.kwargs = group, args, kwargs
        self._function = function
        self._given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        self._waits = dist.get_world_size(group) > 1

    def refuse_traces(self) -> None:
        """Raise in a trace, and while a CUDA graph is captured."""
        captured = any(x.is_cuda for x in self._given) and (
            torch.cuda.is_current_stream_capturing()
        )
        if captured or any(map(is_traced, self._given)):
            # the other ranks can be told only inside torch.func
            self._waits = self._waits and is_transformed() and not captured
            raise ValueError(
                "vocab_group cannot be used in a trace, in torch.func or while a CUDA graph is "
                "captured: the ranks exchange the sizes of their parts, for which the host waits"
            )

    def refuse(self) -> None:
        """Tell the other ranks that this one raises, unless they have met already."""
        if self._waits:
            self._exchanged([_REFUSED])

    def parts(self, size: int, active: Tensor, backend: str) -> VocabularyParts:
        """Exchange the sizes of the parts; compare the arguments and the backend.

        The call takes one collective of 68 integers, for which the host waits. `active` is the mask
        of tokens that count; values of other tokens are not compared.

        Raises:
            ValueError: a part is empty, two parts are the same, arguments differ between ranks, or
                a rank has refused.
        """
        call = _signature(self._function).bind(*self.args, **self.kwargs)
        call.apply_defaults()
        given = {name: x for name, x in call.arguments.items() if name != "vocab_group"}
        reduce = bool(given.get("reduce_hidden_gradient", True))
        if not self._waits and size > 0:
            return UNSPLIT
        rows = given.get("logits", given.get("hidden"))
        active = active.reshape(cast("Tensor", rows).shape[:-1])
        sampled = samples(given, active)
        given["backend"] = backend  # the resolved one: ranks may have chosen it in different ways
        if given.get("teacher") is not None:  # leave out this rank's own part of it
            given["teacher"] = given["teacher"]._shared()
        if "objective" in given:
            given["objective"] = as_objective(given["objective"])
        texts = {name: description_of(x, _SPLIT.get(name)) for name, x in given.items()}
        texts |= _settings(active.device.type)
        read = {name: [*_tensors(x)] for name, x in given.items() if name not in _SPLIT}
        read = {**read, "mask": [active]}
        read = {name: each for name, each in read.items() if each and name not in _COMPUTED}
        digests = [crc32(x.encode()) for x in (self._function.__name__, *texts.values())]
        counted = _counted(active, given.get("cu_seqlens"))
        values = {
            name: torch.cat([_integers(x, name, active, counted) for x in each])
            for name, each in read.items()
        }
        ranks = self._exchanged([size, *digests], _digests(values), self._marks(sampled))
        sizes = [row[0] for row in ranks]
        _refuse_differences(ranks, self._function.__name__, texts, [*read])
        if 0 in sizes:
            raise ValueError(
                f"vocab_group: every rank needs at least one column of the vocabulary, got {sizes}"
            )
        _refuse_copies(ranks, [*sampled])
        return VocabularyParts(self.group.group_name, dist.get_rank(self.group), sizes, reduce)

    def _marks(self, sampled: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Return an integer per sample; it is the rank if the sample distinguishes nothing."""
        marks = _digests({name: _bits(x) for name, (x, _) in sampled.items()})
        telling = torch.stack([tells for _, tells in sampled.values()])
        return torch.where(telling, marks, dist.get_rank(self.group))

    def _exchanged(
        self,
        numbers: Sequence[int],
        digests: Tensor | None = None,
        marks: Tensor | None = None,
    ) -> list[list[int]]:
        """Return the messages of all ranks."""
        self._waits = False
        # a rank that refuses may have got tensors on devices that the group does not support
        kinds = [device.type for device in self.group._device_types]
        devices = [x.device for x in self._given if x.device.type in kinds]
        devices.sort(key=lambda device: device.type == "cpu")
        device = (*devices, torch.device(kinds[0]))[0]
        assert len(numbers) <= 2 + _MOST
        unused = [0] * (2 + _MOST - len(numbers))
        sent = torch.tensor([*numbers, *unused], device=device)
        values = sent.new_zeros(_MOST + _MOST_SAMPLES)
        if digests is not None and marks is not None:
            values[: len(digests)] = digests
            values[_MOST : _MOST + len(marks)] = marks
        ranks: list[list[int]] = gathered(torch.cat([sent, values]), self.group).tolist()
        return ranks


def _settings(device: str) -> dict[str, str]:
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return {
        "torch.is_grad_enabled()": str(torch.is_grad_enabled()),
        "autocast": str(torch.get_autocast_dtype(device) if autocast else None),
    }


def _refuse_differences(
    ranks: Sequence[Sequence[int]], function: str, texts: Mapping[str, str], read: Sequence[str]
) -> None:
    refused = [rank for rank, (size, *_) in enumerate(ranks) if size == _REFUSED]
    if refused:
        raise ValueError(f"vocab_group: this call raised on its ranks {refused}; see there")
    _, call, *differ = (len(set(column)) > 1 for column in zip(*ranks, strict=True))
    same = "must be the same on every rank of vocab_group"
    if call:
        raise ValueError(f"the function {same}; this rank calls {function}")
    if names := [*compress(texts, differ[:_MOST])]:
        found = ", ".join(f"{name}: {texts[name]}" for name in names)
        raise ValueError(
            f"{', '.join(names)} {same} (of tensors the dtype, the shape and whether they need a "
            f"gradient); this rank has {found}"
        )
    if names := [*compress(read, differ[_MOST : 2 * _MOST])]:
        raise ValueError(
            f"{', '.join(names)} {same}, which splits the vocabulary and not the tokens; "
            "the values differ"
        )


def _refuse_copies(ranks: Sequence[Sequence[int]], sampled: Sequence[str]) -> None:
    marks = zip(*(row[-_MOST_SAMPLES:] for row in ranks), strict=True)
    if names := [*compress(sampled, (len(set(mark)) < len(mark) for mark in marks))]:
        raise ValueError(
            f"{' and '.join(names)} must be this rank's part of the vocabulary, got the same "
            "values on several ranks of vocab_group: if every rank has the whole vocabulary, as "
            "with gathered logits, leave vocab_group out; the ranks of two replicas are two "
            "groups; random parts need a seed for each rank"
        )


@functools.cache
def _signature(function: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(function)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple):  # kept tokens
        for each in value:
            yield from _tensors(each)


def _counted(active: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return which sequences have an active token."""
    if cu_seqlens is None:
        return active.any(-1) if active.dim() > 1 else active
    before = torch.nn.functional.pad(active.long().cumsum(0), (1, 0))
    return before[cu_seqlens[:-1].long()] < before[cu_seqlens[1:].long()]


def _digests(given: Mapping[str, Tensor]) -> Tensor:
    """Return an integer for `[N]` integers, which differs if they do, except by coincidence."""
    bits = [*given.values()]
    places = torch.cat([torch.arange(1, len(x) + 1, device=x.device) for x in bits])
    mixed = torch.cat(bits) + places * 0x1E3779B97F4A7C15  # the steps of splitmix64
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return torch.stack([x.sum() for x in mixed.split([len(x) for x in bits])])


def _integers(values: Tensor, name: str, active: Tensor, counted: Tensor) -> Tensor:
    """Return the bits of values as `[N]`, with 0 for those that belong to no active token."""
    values = values.detach()
    values = values.to(torch.float64 if values.is_floating_point() else torch.int64)
    if active.dim() == 1 and values.dim() > 1 and values.shape[0] == 1:
        values = values[0]  # of a teacher's packed rows
    counts = None
    if name in _OF_NO_TOKEN:
        pass
    elif values.shape == active.shape and name != "group_ids":
        counts = active
    elif values.dim() > active.dim() and values.shape[:-1] == active.shape:  # top-k of a teacher
        counts = active[..., None]
    elif values.shape in (counted.shape, (len(counted), 1)):
        counts = counted.reshape(values.shape)
    return _bits(values if counts is None else torch.where(counts, values, 0))


def _bits(values: Tensor) -> Tensor:
    """Return 64-bit numbers as integers `[N]`; -0.0 is 0.0."""
    return (values + 0).reshape(-1).view(torch.int64)
