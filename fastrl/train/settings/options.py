"""The fields of a settings dataclass: default, help text, bounds, and the check of a value."""

import math
from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any, Literal, get_args, get_origin


def option(
    default: Any,
    help: str,  # noqa: A002
    *,
    above: float | None = None,
    least: float | None = None,
    result: bool = True,
    by_task: Mapping[str, Any] | None = None,
) -> Any:
    """A field.

    Args:
        default: The default of the field.
        help: Its help text on the command line.
        above: Exclusive lower bound of its value.
        least: Inclusive lower bound of its value.
        result: Whether the value changes what a run computes, beyond rounding. If not, it may
            differ when the run is resumed.
        by_task: Other defaults, by the embedded task. The field is then None until `fill_defaults`.
    """
    metadata = {"help": help, "result": result, "above": above, "least": least}
    if by_task is None:
        return field(default=default, metadata=metadata)
    defaults: dict[str | None, Any] = {None: default} | dict(by_task)
    shown = "; ".join(
        _shown(default) if task is None else f"{task}: {_shown(value)}"
        for task, value in defaults.items()
    )
    metadata |= {"help": f"{help} (default: {shown})", "defaults": defaults}
    return field(default=None, metadata=metadata)


def _shown(default: Any) -> str:
    return " ".join(default) if isinstance(default, tuple) else str(default)


def default_of(f: Field[Any], task: str | None) -> Any:
    """The default of the field ``f`` for an embedded task, or without one."""
    defaults = f.metadata.get("defaults", {None: f.default})
    return defaults.get(task, defaults[None])


def fill_defaults(settings: Any) -> None:
    """Give the fields that were not given, and have defaults per task, those of the task."""
    task = getattr(settings, "task", None)
    for f in fields(settings):
        if "defaults" in f.metadata and getattr(settings, f.name) is None:
            setattr(settings, f.name, default_of(f, task))


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


def is_none(kind: Any, value: Any) -> bool:
    """Whether text, ``none`` or ``null``, stands for no value of an optional field."""
    optional = type(None) in get_args(kind)
    return optional and value in ("none", "null") and value not in choices(kind)
