"""The command line: arguments to a config, errors to one clear line."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import torch

from fastrl.train.config import LoopConfig
from fastrl.train.plan import report
from fastrl.train.run.run_directory import SETTINGS, read_settings, run_directory
from fastrl.train.run.run_log import Summary
from fastrl.train.settings.options import choices

Config = TypeVar("Config", bound=LoopConfig)


def parse(kind: type[Config], arguments: Sequence[str] | None = None) -> Config:
    """Make a config from the command line, which overrides ``--config FILE``.

    With ``--resume``, both override the settings of the run that is resumed.

    Args:
        kind: The dataclass to fill; its fields are the options.
        arguments: The arguments; by default ``sys.argv``.

    Raises:
        ValueError: A value is invalid, or the file cannot be read or has unknown fields.
    """
    parser = argparse.ArgumentParser(
        description=kind.__doc__, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    parser.add_argument(
        "--config", metavar="FILE", help="JSON of settings, such as an old run's config.json"
    )
    for f in fields(kind):
        shown = " ".join(f.default) if isinstance(f.default, tuple) else f.default
        default = "" if shown in (None, "") else f" (default: {shown})"
        shape = _shape(f.type)
        flags = dict.fromkeys([f"--{f.name}", f"--{f.name.replace('_', '-')}"])
        parser.add_argument(*flags, dest=f.name, help=f.metadata["help"] + default, **shape)
    _add_plan(parser)
    typed = vars(parser.parse_args(arguments))
    typed.pop("plan", None)
    file = typed.pop("config", None)
    given = ({} if file is None else _settings(kind, file)) | typed
    if not given.get("resume"):
        return kind(**given)
    where = {key: given[key] for key in ("resume", "name", "out_dir") if key in given}
    directory = run_directory(kind(**where), kind.loop)
    if not (directory / SETTINGS).exists():
        return kind(**given)
    place = {"name": directory.name, "out_dir": str(directory.parent)}
    return kind(**_settings(kind, str(directory / SETTINGS)) | given | place)


def main(kind: type[Config], train: Callable[[Config], Summary]) -> None:
    """Parse the command line, train, and print how the run ended.

    With ``--plan`` it prints the predicted memory instead. The exit status is 2 after bad input,
    gradients that are not finite, a full disk or a full memory, and 130 after an interrupt.
    """
    try:
        config, limit = parse(kind), _limit_of_plan()
        if limit is not None:
            sys.stdout.write(f"{report(config, limit)}\n")
            sys.exit(0)
        summary = train(config)
    except (ValueError, FloatingPointError, OSError, torch.OutOfMemoryError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    sys.stdout.write(f"{summary}\n")
    sys.exit(130 if summary.interrupted else 0)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan",
        nargs="?",
        type=float,
        const=math.inf,
        metavar="GIB",
        help="print the predicted peak memory, and how to fit GIB, instead of training",
    )


def _limit_of_plan() -> float | None:
    """The GiB that ``--plan`` names, infinity without a number, None without ``--plan``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_plan(parser)
    limit: float | None = parser.parse_known_args()[0].plan
    return limit


def _shape(kind: Any) -> dict[str, Any]:
    """The options of argparse for a field of type ``kind``."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if values := choices(kind):
        return {"choices": [value for value in values if value is not None]}
    if get_origin(kind) is tuple:
        return {"nargs": "*", "metavar": "STR"}
    (value, *_) = get_args(kind) or (kind,)
    if type(None) not in get_args(kind):
        return {"type": value, "metavar": value.__name__.upper()}
    return {
        "type": lambda text: None if text in ("none", "null") else value(text),
        "metavar": value.__name__.upper(),
    }


def _settings(kind: type[Config], file: str) -> dict[str, Any]:
    settings = read_settings(Path(file))
    unknown = settings.keys() - {f.name for f in fields(kind)}
    if unknown:
        raise ValueError(
            f"config: {file} has fields that {kind.__name__} does not have: "
            f"{', '.join(sorted(unknown))}"
        )
    return settings
