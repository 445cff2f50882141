"""The types of settings, which are checked when a config is made."""

import math
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise a `ValueError` if ``value`` is not of the type ``kind`` of a field."""
    if get_origin(kind) in (Union, UnionType):  # or None
        if value is not None:
            check_type(name, value, get_args(kind)[0])
    elif get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
    elif get_origin(kind) is tuple:
        items = get_args(kind)
        fixed = None if items[-1] is ... else len(items)
        if not isinstance(value, tuple) or fixed not in (None, len(value)):
            raise ValueError(f"{name} must be {fixed or 'a list of'} values, got {value!r}")
        for item in value:
            check_type(f"each of {name}", item, items[0])
    else:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not kind and not (kind is float and whole):
            raise ValueError(f"{name} must be {kind.__name__}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
