"""What the ranks of a split vocabulary tell each other before a call, and must agree on."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.ops._process_groups import checked_group, gathered
from fastrl.ops._vocabulary_parts.described import described
from fastrl.ops._vocabulary_parts.parts import WHOLE, VocabularyParts, group_of
from fastrl.tracing import is_traced

P = ParamSpec("P")
R = TypeVar("R")

#: The dimension in which an argument is split; its values are the rank's own.
_SPLIT = {"logits": -1, "weight": 0, "bias": 0, "lora": 0}
#: What ranks compute by themselves and may round differently; compared but for the values.
_COMPUTED = ("hidden", "old_logprobs", "ref_logprobs", "rollout_logprobs")
_REFUSED = -1  # in place of the size of a part


def ranks_agree(function: Callable[P, R]) -> Callable[P, R]:
    """Let all ranks of a split vocabulary make the same call, or raise on all of them.

    With a group, also one of a DTensor, the function gets an `Agreement` as `vocab_group`. It must
    ask that for the `parts` once all checks are done.
    """
    names = [*_signature(function).parameters]
    part = "logits" if "logits" in names else "weight"
    place = names.index(part)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
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
    """Return what a function of `ranks_agree` was given as `vocab_group`."""
    return vocab_group if isinstance(vocab_group, Agreement) else None


def _together(
    function: Callable[..., R],
    group: dist.ProcessGroup,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> R:
    agreement = Agreement(group, function, args, kwargs)
    agreement.refuse_traces()
    try:
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
        """`function` is called with `args` and `kwargs`."""
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
            raise ValueError(
                "vocab_group cannot be used in a trace, in torch.func or while a CUDA graph is "
                "captured: the ranks exchange the sizes of their parts, for which the host waits"
            )

    def refuse(self) -> None:
        """Tell the other ranks that this one raises, unless they have met already."""
        if self._waits:
            self._exchanged(_REFUSED, 0, None)

    def parts(self, size: int, active: Tensor, backend: str) -> VocabularyParts:
        """Exchange the sizes of the parts; compare the arguments, and which backend computes.

        Takes one collective of three integers, which the host waits for. `active` says which tokens
        count; what is given for others is not compared.

        Raises:
            ValueError: a part is empty, arguments differ between ranks, or a rank has refused.
        """
        call = _signature(self._function).bind(*self.args, **self.kwargs)
        call.apply_defaults()
        given = {name: x for name, x in call.arguments.items() if name != "vocab_group"}
        reduce = bool(given.get("reduce_hidden_gradient", True))
        if not self._waits and size > 0:
            return WHOLE
        text = self._text(given, backend, active.device.type)
        active = active.reshape(given["token_ids"].shape)
        counted = _counted(active, given.get("cu_seqlens"))
        read = {
            name: [*_tensors(x)]
            for name, x in {**given, "mask": active}.items()
            if name not in _SPLIT and name not in _COMPUTED
        }
        values = torch.cat([_integers(x, active, counted) for each in read.values() for x in each])
        exchanged = self._exchanged(size, crc32(text.encode()), values).tolist()
        sizes, calls, digests = zip(*exchanged, strict=True)
        if _REFUSED in sizes:
            ranks = [rank for rank, size in enumerate(sizes) if size == _REFUSED]
            raise ValueError(f"vocab_group: this call raised on its ranks {ranks}; see there")
        if len(set(calls)) > 1:
            raise ValueError(
                "all ranks of vocab_group must make the same call, with the same options, shapes, "
                f"dtypes and tensors that need a gradient; they differ, this rank has {text}"
            )
        if len(set(digests)) > 1:
            raise ValueError(
                f"{', '.join(name for name, each in read.items() if each)} must be the same on "
                "every rank of vocab_group, which splits the vocabulary and not the tokens; "
                "they differ"
            )
        if 0 in sizes:
            raise ValueError(
                "vocab_group: every rank needs at least one column of the vocabulary, "
                f"got {[*sizes]}"
            )
        rank = dist.get_rank(self.group)
        return VocabularyParts(self.group.group_name, rank, [*sizes], reduce)

    def _text(self, given: Mapping[str, object], backend: str, device: str) -> str:
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        parameters = _signature(self._function).parameters
        texts = {name: described(x, _SPLIT.get(name)) for name, x in given.items()}
        changed = (
            f"{name}={text}"
            for name, text in texts.items()
            if text != repr(parameters[name].default)
        )
        dtype = torch.get_autocast_dtype(device) if autocast else None
        return (
            f"{self._function.__name__}({', '.join(changed)}) on backend {backend}, "
            f"grad enabled: {torch.is_grad_enabled()}, autocast: {dtype}"
        )

    def _exchanged(self, size: int, call: int, values: Tensor | None) -> Tensor:
        """Return what the ranks send, `[R, 3]`."""
        self._waits = False
        # a rank that refuses may have been given tensors on other devices than those of the group
        kinds = [device.type for device in self.group._device_types]
        devices = [x.device for x in self._given if x.device.type in kinds]
        devices.sort(key=lambda device: device.type == "cpu")
        device = (*devices, torch.device(kinds[0]))[0]
        number = functools.partial(torch.full, (), dtype=torch.int64, device=device)
        digest = number(0) if values is None else _digest(values)
        return gathered(torch.stack([number(size), number(call), digest]), self.group)


@functools.cache
def _signature(function: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(function)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)


def _counted(active: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return which sequences have an active token."""
    if cu_seqlens is None:
        return active.any(-1) if active.dim() > 1 else active
    before = torch.nn.functional.pad(active.long().cumsum(0), (1, 0))
    return before[cu_seqlens[:-1].long()] < before[cu_seqlens[1:].long()]


def _integers(values: Tensor, active: Tensor, counted: Tensor) -> Tensor:
    """Return the bits of values as `[N]`, of those that belong to no active token as of 0."""
    real = values.is_floating_point()
    values = values.detach().to(torch.float64 if real else torch.int64)
    if values.shape == active.shape:
        values = torch.where(active, values, 0)
    elif real and values.shape in (counted.shape, (len(counted), 1)):
        values = torch.where(counted.reshape(values.shape), values, 0)
    return values.reshape(-1).view(torch.int64)


def _digest(bits: Tensor) -> Tensor:
    """Return an integer that differs where values or places do, but for a coincidence."""
    places = torch.arange(1, bits.shape[0] + 1, device=bits.device)
    mixed = bits + places * 0x1E3779B97F4A7C15  # the steps of splitmix64
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed.sum()
