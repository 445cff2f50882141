"""Descriptions of arguments that are equal in every process, for comparison between ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from numbers import Number
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

_PLAIN = (str, type(None), bytes, bytearray, slice, range, Enum, torch.dtype, Number)


def description_of(
    value: Any, split: int | None = None, known: dict[int, tuple[object, str]] | None = None
) -> str:
    """Return a description that is equal in two processes with the same argument.

    Values of tensors are left out. Numbers of equal value are the same, whatever their type.
    `split` is a dimension in which tensors may differ; `known` maps the id of an object to the
    object, which it keeps alive, and its description.
    """
    if isinstance(value, Tensor):
        shape = [*value.shape]
        if split is not None:
            del shape[split]
        gradient = ", requires_grad" if value.requires_grad else ""
        return f"{value.device.type} {value.dtype} {shape}{gradient}"
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # of NumPy
    if isinstance(value, int | float) and not isinstance(value, bool | Enum):
        return str(float(value) if abs(value) < 2**53 else value)
    if isinstance(value, _PLAIN):
        return repr(value)
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = value, "..."  # for references to itself
        inner = functools.partial(description_of, split=split, known=known)
        known[id(value)] = value, _of_parts(value, inner)
    return known[id(value)][1]


def _of_parts(value: Any, inner: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{inner(key)}: {inner(x)}' for key, x in value.items()))}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(inner, value))})"
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(inner, value)))}}}"
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{getattr(named, '__module__', None)}.{named.__qualname__}"
    made_of = _made_of(value)
    return name if made_of is None else f"{name} #{crc32(inner(made_of).encode()):08x}"


def _made_of(value: Any) -> object:
    """Return the parts in which functions of the same name can differ."""
    value = getattr(value, "_torchdynamo_orig_callable", value)
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, value.co_consts
    if isinstance(value, FunctionType):
        cells = [x.cell_contents for x in value.__closure__ or () if x != CellType()]
        return value.__code__, value.__defaults__, value.__kwdefaults__, cells
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, type) or not (is_dataclass(value) or callable(value)):
        return None
    if isinstance(value, torch.nn.Module) and any(True for _ in value.parameters()):
        return None  # a model holds more than its function: its state in the run
    return type(value).__call__ if callable(value) else None, _attributes(value)


def _attributes(value: Any) -> dict[str, object]:
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}
