"""The fields of a settings dataclass: default, help text, bounds, and the check of a value."""

import math
from dataclasses import field, fields
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
        value, (above, least) = (
            getattr(settings, f.name),
            (f.metadata["above"], f.metadata["least"]),
        )
        if get_origin(f.type) is tuple and isinstance(value, list):  # from JSON
            value = tuple(value)
            setattr(settings, f.name, value)
        _check_type(f.name, value, f.type)
        if value is not None and above is not None and not value > above:
            raise ValueError(f"{f.name} must be above {above}, got {value}")
        if value is not None and least is not None and not value >= least:
            raise ValueError(f"{f.name} must be at least {least}, got {value}")


def _check_type(name: str, value: Any, kind: Any) -> None:
    allowed = choices(kind)
    if allowed:
        if value not in allowed:
            shown = ", ".join("null" if choice is None else str(choice) for choice in allowed)
            raise ValueError(f"{name} must be one of {shown}, got {value!r}")
        return
    if get_origin(kind) is tuple:
        item_type = get_args(kind)[0]
        if not isinstance(value, tuple):
            raise ValueError(f"{name} must be a list of {item_type.__name__}, got {value!r}")
        for item in value:
            _check_type(f"each of {name}", item, item_type)
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
