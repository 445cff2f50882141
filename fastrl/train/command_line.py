"""The command line, which turns options into a config, and errors into an exit status."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import tyro

from fastrl import command_start
from fastrl.train.config import RunConfig
from fastrl.train.report import printable
from fastrl.train.run_log import last_run, read_settings

Config = TypeVar("Config", bound=RunConfig)


def parse(kind: type[Config], arguments: Sequence[str] | None = None, program: str = "") -> Config:
    """Make a config from the command line.

    With ``--resume`` the defaults are the settings of the run in OUT.

    Raises:
        ValueError: A value is invalid, or there is no run to resume.
        SystemExit: An argument is unknown (status 2), or is ``--help`` (status 0).
    """

    def read(**default: Any) -> Config:
        return tyro.cli(  # type: ignore[no-any-return]
            kind,
            prog=program or f"python -m fastrl.train.{kind.loop}",
            description=kind.__doc__,
            args=arguments,
            use_underscores=True,
            **default,
        )

    config = read()
    if not config.resume:
        return config
    directory = last_run(kind.loop) if config.out is None else Path(config.out)
    settings = read_settings(directory)
    if unknown := settings.keys() - {field.name for field in fields(kind)}:
        raise ValueError(
            f"resume: {directory} is a run of another loop or version: {kind.loop} has no "
            f"{min(unknown)}"
        )
    return read(default=kind(**settings | {"out": str(directory)}))


def main(
    kind: type[Config],
    train: Callable[[Config], Any],
    arguments: Sequence[str] | None = None,
    program: str = "",
) -> NoReturn:
    """Parse the command line, train, and print how the run ended; never returns.

    With ``--plan`` it prints the predicted memory instead. The exit status is 2 after bad input,
    non-finite numbers, a full disk or exhausted memory, and 130 after an interrupt.
    """
    command_start.done()
    try:
        config = parse(kind, arguments, program)
        if config.plan is not None:
            with command_start.quiet():
                from fastrl.train.plan import report

            sys.stdout.write(report(config) + "\n")
            sys.exit(0)
        summary = train(config)
    except (ValueError, FloatingPointError, OSError, torch.OutOfMemoryError) as error:
        for line in [*getattr(error, "__notes__", []), f"error: {error}"]:
            sys.stderr.write(printable(f"{line}\n", keep="\n"))
        sys.exit(2)
    except KeyboardInterrupt:  # before the first step, or the second interrupt
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    sys.stdout.write(f"{summary}\n")
    sys.exit(130 if summary.interrupted else 0)
