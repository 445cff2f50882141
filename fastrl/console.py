"""The command ``fastrl``: training loops, benchmarks, and what works on this machine.

Only torch is imported until a subcommand needs more, and a loop only after its arguments are read.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import fastrl
from fastrl import command_start, doctor

LOOPS = {
    "grpo": "train a policy on rewards, compared within groups of completions",
    "ppo": "train a policy on rewards, with a value model",
}
_HELP = f"""\
usage: fastrl COMMAND [OPTIONS]

fastrl {fastrl.__version__}: reinforcement learning of language models with fused losses.

commands:
{"".join(f"  {name:<9} {text}{chr(10)}" for name, text in LOOPS.items())}\
  bench     measure the operators on this machine, beside other libraries
  doctor    print what works on this machine, and what is missing

options:
  -h, --help   show this text; fastrl COMMAND --help lists the options of a command
  --version    print the version

examples:
  fastrl grpo --out runs/first --steps 200
  fastrl ppo --seed 1
  fastrl bench --quick
  fastrl doctor
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand; the exit status is 2 if there is none of that name.

    Args:
        arguments: The arguments; by default ``sys.argv``.
    """
    first, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if first in ("-h", "--help"):
        sys.stdout.write(_HELP)
    elif first == "--version":
        sys.stdout.write(f"fastrl {fastrl.__version__}\n")
    elif first == "doctor" and rest in (["-h"], ["--help"]):
        sys.stdout.write(
            "usage: fastrl doctor\n\nPrint what works on this machine, and what is missing.\n"
        )
    elif first == "doctor" and not rest:
        doctor.main()
    elif first == "doctor":
        _fail(f"doctor takes no arguments, got {' '.join(rest)}")
    elif first == "bench":
        from fastrl.bench import command_line

        sys.exit(command_line.main(rest))
    elif first in LOOPS:
        _train(first, rest)
    else:
        _fail(f"there is no command {first!r}; fastrl --help lists them")


def _train(loop: str, arguments: list[str]) -> None:
    try:
        from fastrl.train import command_line, config
    except ModuleNotFoundError as error:  # its message says how to install the extra
        _fail(str(error))

    sys.path.insert(0, os.getcwd())  # as python -m does: rewards may be there

    def train(settings: Any) -> Any:
        with command_start.quiet():
            module = importlib.import_module(f"fastrl.train.{loop}")
        return module.train(settings)

    kind: Any = {"grpo": config.GrpoConfig, "ppo": config.PpoConfig}[loop]
    command_line.main(kind, train, arguments, f"fastrl {loop}")


def _fail(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)
