"""The fields of a settings dataclass: default, help text, bounds, and the check of a value."""

import math
from dataclasses import Field, field, fields
from typing import Any, Literal, get_args, get_origin


def option(
    default: Any,
    help: str,  # noqa: A002
    *,
    above: float | None = None,
    least: float | None = None,
    result: bool = True,
) -> Any:
    """A field.

    Args:
        default: The default of the field.
        help: Its help text on the command line.
        above: Exclusive lower bound of its value.
        least: Inclusive lower bound of its value.
        result: Whether the value changes what a run computes, beyond rounding. If not, it may
            differ when the run is resumed.
    """
    bounds = {"above": above, "least": least}
    return field(default=default, metadata={"help": help, "result": result, **bounds})


def check_options(settings: Any) -> None:
    """Raise a `ValueError` that names the first field with a value of a wrong type or size."""
    for f in fields(settings):
        setattr(settings, f.name, checked(f, getattr(settings, f.name)))


def checked(f: Field[Any], value: Any) -> Any:
    """A value of the field ``f``, with a list made a tuple.

    Raises:
        ValueError: The type or the size is wrong; the message begins with the name of the field.
    """
    if get_origin(f.type) is tuple and isinstance(value, list):  # from a file
        value = tuple(value)
    _check_type(f.name, value, f.type)
    above, least = f.metadata["above"], f.metadata["least"]
    if value is not None and above is not None and not value > above:
        raise ValueError(f"{f.name} must be above {above}, got {value}")
    if value is not None and least is not None and not value >= least:
        raise ValueError(f"{f.name} must be at least {least}, got {value}")
    return value


def _check_type(name: str, value: Any, kind: Any) -> None:
    allowed = choices(kind)
    if allowed:
        if value not in allowed:
            shown = ", ".join("null" if choice is None else str(choice) for choice in allowed)
            raise ValueError(f"{name} must be one of {shown}, got {value!r}")
        return
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{name} must be a list of str, got {value!r}")
        return
    allowed = get_args(kind) or (kind,)
    numeric = isinstance(value, int) and not isinstance(value, bool) and float in allowed
    if not numeric and type(value) not in allowed:
        expected = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def choices(kind: Any) -> tuple[Any, ...]:
    """The values of a Literal, and None if it is optional; empty for other types."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    literals = [choice for part in get_args(kind) for choice in choices(part)]
    return (*literals, None) if literals else ()


def is_none(kind: Any, value: Any) -> bool:
    """Whether text, ``none`` or ``null``, stands for no value of an optional field."""
    optional = type(None) in get_args(kind)
    return optional and value in ("none", "null") and value not in choices(kind)
