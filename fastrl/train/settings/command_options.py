"""The options of a settings dataclass on the command line, in groups, through `tyro`."""

import inspect
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields, make_dataclass
from typing import Annotated, Any, get_args, get_origin

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from fastrl.train.settings.options import choices, is_none

_FILE = "YAML or JSON of settings, such as an old run's config.json."
_PLAN = "Print the predicted peak memory, and how to fit GIB, instead of training."


def read_options(
    kind: type,
    arguments: Sequence[str],
    defaults: Mapping[str, Any],
    program: str,
    *,
    plans: bool,
    examples: str,
) -> dict[str, Any]:
    """The value of every field of ``kind``, of ``--config`` and of ``--plan``.

    Args:
        kind: A dataclass. The fields of each of its bases that has some are a group, whose title is
            the name of the base, and whose text is the beginning of its docstring.
        arguments: The command line.
        defaults: Values that replace defaults of fields, which must be valid.
        program: The beginning of the command line.
        plans: Whether there is ``--plan``, in GiB, infinity without a number, None without it.
        examples: The end of the help.

    Raises:
        SystemExit: An argument is not understood, or it was ``--help``.
    """
    parts: list[Any] = [
        ("config", _described(str | None, _FILE, None, "FILE"), field(default=None))
    ]
    if plans:
        planned = Annotated[Any, tyro.conf.arg(help=_PLAN, help_behavior_hint=""), _PLANNED]
        parts.append(("plan", planned, field(default=None)))
    for title, text, own in _groups(kind):
        options = [
            (
                f.name,
                _by_task(f)
                if value is None and "defaults" in f.metadata
                else _described(f.type, f.metadata["help"], value),
                field(default=value),
            )
            for f, value in ((f, defaults.get(f.name, f.default)) for f in own)
        ]
        group = make_dataclass(title.replace(" ", "_"), options, namespace={"__doc__": text})
        named = Annotated[group, tyro.conf.arg(name=title)]  # type: ignore[valid-type]
        parts.append((group.__name__, named, field(default_factory=group)))
    everything = make_dataclass("Options", parts, namespace={"__doc__": _beginning(kind)})
    try:
        read: Any = tyro.cli(
            everything,
            prog=program,
            args=list(arguments),
            use_underscores=True,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except SystemExit as end:
        if end.code in (0, None) and {"-h", "--help"} & set(arguments):
            sys.stdout.write(f"\n{examples}")
        raise
    values = vars(read)
    alone = {name: values[name] for name in ("config", "plan") if name in values}
    return alone | {
        name: value
        for group in values.values()
        if hasattr(group, "__dataclass_fields__")
        for name, value in vars(group).items()
    }


def _groups(kind: type) -> list[tuple[str, str, list[Field[Any]]]]:
    """Title, text and fields of each class that declares some, the loop's own first."""
    left = {f.name: f for f in fields(kind)}
    groups = []
    for base in kind.__mro__:
        declared = [left.pop(name) for name in inspect.get_annotations(base) if name in left]
        if declared:
            name = re.sub(r"(Settings|Config)$", "", base.__name__)
            title = re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()
            groups.append((title, "" if base is kind else _beginning(base), declared))
    return groups


def _beginning(described: type) -> str:
    """The first paragraph of a docstring."""
    return (inspect.getdoc(described) or "").partition("\n\n")[0]


def _described(kind: Any, text: str, default: Any, metavar: str | None = None) -> Any:
    """The type of an option for tyro, with its help and, if it is optional, how to read it."""
    hint = None
    if default is None:
        hint = "(default: unset)" if "none" in choices(kind) else "(default: none)"
    elif default == ():
        hint = "(default: empty)"
    option = tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint=hint)
    if type(None) not in get_args(kind):
        return Annotated[kind, option]
    return Annotated[kind, option, _optional(kind)]


def _optional(kind: Any) -> PrimitiveConstructorSpec[Any]:
    """How to read ``none``, or a value of the type that is left."""
    allowed = {str(value): value for value in choices(kind) if value is not None}
    value_type = next(part for part in get_args(kind) if part is not type(None))
    shown = "{" + ",".join(allowed) + "}" if allowed else value_type.__name__.upper()
    if "none" not in allowed:
        shown += "|none"

    def read(texts: list[str]) -> Any:
        (text,) = texts
        if is_none(kind, text):
            return None
        if allowed and text not in allowed:
            raise ValueError(f"expected one of {shown}, got {text!r}")
        return allowed[text] if allowed else value_type(text)

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=shown,
        instance_from_str=read,
        is_instance=lambda value: value is None or not isinstance(value, tuple),
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    )


def _by_task(f: Field[Any]) -> Any:
    """The type of an option whose help tells its defaults, by the task, and None if not given."""
    several = get_origin(f.type) is tuple
    item: Any = get_args(f.type)[0] if several else f.type
    shown: str = item.__name__.upper()
    spec = PrimitiveConstructorSpec[Any](
        nargs="*" if several else 1,
        metavar=f"[{shown} [{shown} ...]]" if several else shown,
        instance_from_str=lambda texts: tuple(map(item, texts)) if several else item(texts[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )
    return Annotated[Any, tyro.conf.arg(help=f.metadata["help"], help_behavior_hint=""), spec]


def _gib(texts: list[str]) -> float:
    if len(texts) > 1:
        raise ValueError(f"expected one number at most, got {' '.join(texts)}")
    return float(texts[0]) if texts else math.inf


_PLANNED = PrimitiveConstructorSpec[Any](
    nargs=(0, 1),
    metavar="[GIB]",
    instance_from_str=_gib,
    is_instance=lambda value: value is None or isinstance(value, float),
    str_from_instance=lambda value: [str(value)],
)
