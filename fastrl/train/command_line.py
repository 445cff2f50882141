"""The command line: arguments and files to a config, errors to one clear line."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from fastrl.train.config import LoopConfig, RunConfig
from fastrl.train.distributed import ranks
from fastrl.train.distributed.process_group import joined, reports
from fastrl.train.run.run_directory import SETTINGS, read_settings, run_directory
from fastrl.train.run.terminal import printable
from fastrl.train.settings.command_options import read_options
from fastrl.train.settings.options import checked, is_none

Config = TypeVar("Config", bound=LoopConfig)

_EXAMPLES = """\
examples:
  {0} --name first --steps 200 --seed 1
  {0} --config run.yaml --learning_rate 1e-4
  {0} --resume --name first
"""
_EXAMPLE_OF_A_PLAN = """\
  {0} --plan 24 --model Qwen/Qwen3-0.6B
"""


def parse(kind: type[Config], arguments: Sequence[str] | None = None) -> Config:
    """Make a config from the command line, which overrides ``--config FILE``.

    With ``--resume``, both override the settings of the run that is resumed.

    Args:
        kind: The dataclass to fill; its fields are the options.
        arguments: The arguments; by default ``sys.argv``.

    Raises:
        ValueError: A value is invalid, or the file cannot be read or has unknown fields.
        SystemExit: An argument is not understood, status 2; or it was ``--help``, status 0.
    """
    return _parse(kind, arguments, f"python -m fastrl.train.{kind.loop}")[0]


def main(
    kind: type[Config],
    train: Callable[[Config], Any],
    arguments: Sequence[str] | None = None,
    *,
    program: str | None = None,
) -> None:
    """Parse the command line, train, and print how the run ended.

    With ``--plan`` it prints the predicted memory instead. The exit status is 2 after bad input,
    gradients that are not finite, a full disk or a full memory, and 130 after an interrupt that
    stopped the run.

    Args:
        kind: The settings of the loop.
        train: The loop; it returns a `Summary`.
        arguments: The arguments; by default ``sys.argv``.
        program: How the person called it, for the help.
    """
    try:
        config, limit = _parse(kind, arguments, program or f"python -m fastrl.train.{kind.loop}")
        if limit is not None:
            from fastrl.train.plan import report

            sys.stdout.write(report(cast("Any", config), limit) + "\n")
            sys.exit(0)
        with joined(config):
            summary, prints = train(config), ranks.is_first()
    except (ValueError, FloatingPointError, OSError, torch.OutOfMemoryError) as error:
        if reports(error):
            said = printable(str(error), keep="\n")
            sys.stderr.write(f"error: {said}\n")
        sys.exit(2)
    except KeyboardInterrupt:  # before the first step, or a second one
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    if prints:
        sys.stdout.write(f"{summary}\n")
    sys.exit(130 if summary.interrupted else 0)


def config_of(loop: str) -> type[LoopConfig]:
    """The settings of the loop of that name; its module is imported only if they are in there."""
    found = _kinds(LoopConfig).get(loop)
    if found is None:
        importlib.import_module(f"fastrl.train.{loop}")
        found = _kinds(LoopConfig)[loop]
    return found


def _kinds(kind: type[LoopConfig]) -> dict[str, type[LoopConfig]]:
    below = [_kinds(derived) for derived in kind.__subclasses__()]
    own = {kind.loop: kind} if "loop" in vars(kind) else {}
    return {name: found for some in [*below, own] for name, found in some.items()}


def _parse(
    kind: type[Config], arguments: Sequence[str] | None, program: str
) -> tuple[Config, float | None]:
    """The config, and the GiB that ``--plan`` names: infinity without a number, else None.

    What the command line gives must override files that it names, so it is read once more with
    their settings as defaults.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    plans = issubclass(kind, RunConfig)

    def read(defaults: Mapping[str, Any]) -> dict[str, Any]:
        examples = _EXAMPLES + (_EXAMPLE_OF_A_PLAN if plans else "")
        return read_options(
            kind, arguments, defaults, program, plans=plans, examples=examples.format(program)
        )

    given = read({})
    limit, file = given.pop("plan", None), given.pop("config")
    defaults = {} if file is None else _settings(kind, file)
    if defaults.pop("trust_remote_code", False) and not given["trust_remote_code"]:
        raise ValueError(
            f"config: {file} asks for trust_remote_code, which a person must type: add "
            "--trust_remote_code"
        )
    if defaults:
        given = {name: value for name, value in read(defaults).items() if name in given}
    if given["resume"]:
        where = {name: given[name] for name in ("resume", "name", "out_dir")}
        directory = run_directory(kind(**where), kind.loop)
        if (directory / SETTINGS).exists():
            of_run = _settings(kind, str(directory / SETTINGS))
            of_run.pop("trust_remote_code", None)  # a person must ask for it, not a file of the run
            defaults = of_run | defaults
            given = {name: value for name, value in read(defaults).items() if name in given}
            given |= {"resume": True, "name": directory.name, "out_dir": str(directory.parent)}
    return kind(**given), limit


def _settings(kind: type[LoopConfig], file: str) -> dict[str, Any]:
    """The settings in a file, each of the type of its field."""
    settings = read_settings(Path(file))
    known = {f.name: f for f in fields(kind)}
    unknown = settings.keys() - known.keys()
    if unknown:
        owners = [
            loop
            for loop, other in _kinds(LoopConfig).items()
            if settings.keys() <= {f.name for f in fields(other)}
        ]
        hint = f"; they are settings of {owners[0]}" if owners else ""
        raise ValueError(
            f"config: {file} has fields that {kind.__name__} does not have: "
            f"{', '.join(sorted(unknown))}{hint}"
        )
    try:
        return {
            name: None if is_none(known[name].type, value) else checked(known[name], value)
            for name, value in settings.items()
        }
    except ValueError as error:
        raise ValueError(f"config: {file}: {error}") from error
