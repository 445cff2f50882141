"""The options of `fastrl bench`."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from fastrl import command_start
from fastrl.backend import unavailable
from fastrl.bench import report
from fastrl.bench.case import BOTH, FORWARD, PASSES
from fastrl.bench.cases import OPS, SELECTIONS, Size
from fastrl.bench.models import MODELS
from fastrl.bench.peers import PEERS, is_installed
from fastrl.bench.plots import draw_or_say
from fastrl.bench.run import Run
from fastrl.bench.timing import LATE, Plan
from fastrl.bench.worker import Settings

BACKENDS = ("cpu", "triton", "cuda", "reference")
DTYPES = ("float32", "bfloat16", "float16")
SUBCOMMANDS = ("step", "plot")
#: Seconds of `--quick`, from the start of the command until all has been measured, and until the
#: plots are drawn; two minutes are left for the end of the process.
QUICK, PLOTTED = 106.0, 117.0
LONGER = "--resume --seconds 3600"
_DESCRIPTION = """\
Measure fastrl's operators on this machine, beside every peer that is installed.

The default is a selection of operators and of shapes of real models. --op, --model, --rows, --dtype
and --variant choose from it or replace its sizes. Results are in DIR: results.md, results.json and
plots. Ctrl-C keeps everything measured so far, and --resume goes on from there.

  fastrl bench step --help    what a GRPO step of a transformers model is made of
  fastrl bench plot --help    draw the plots of results.json again
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``fastrl bench`` and return its exit status.

    Returns:
        1 if a call of fastrl failed, or a case for another reason than time; 0 if not; 2 for
        options that make no sense; 130 after Ctrl-C.
    """
    command_start.done()
    signal.signal(signal.SIGTERM, _interrupt)
    if arguments and arguments[0] == "step":
        from fastrl.bench import step

        return step.main(arguments[1:])
    if arguments and arguments[0] == "plot":
        from fastrl.bench import plots

        return plots.main(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        print(_listing())
        return 0
    try:
        settings = _settings(options)
        options.out.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["fastrl", "bench", *arguments])
        seconds = options.seconds or (QUICK if options.quick else 3600.0)
        patience = options.patience or (25.0 if options.quick else 150.0)
        limits = {"seconds": seconds, "silent": min(patience, seconds)}
        begin = command_start.BEGIN if options.quick and not options.seconds else None
        run = Run(settings, options.out, command, **limits, begin=begin)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return _run(run, options)


def _run(run: Run, options: argparse.Namespace) -> int:
    try:
        found = run.main(resume=options.resume)
        status = 0
    except KeyboardInterrupt:
        print("\ninterrupted: what was measured is kept, and --resume goes on", file=sys.stderr)
        found, status = run.results(), 130
    except (RuntimeError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(f"written: {options.out / 'results.md'}, results.json")
    failed = [f"{name}: {why}" for name, why in found["not_run"].items() if why != LATE]
    failed += report.failures_of_fastrl(found)
    print("".join(f"FAILED: {line}\n" for line in failed), end="")
    late = report.late(found)
    print("".join(f"{LATE}: {line}\n" for line in late), end="")
    if status == 0 and late and options.seconds is None:
        print(f"more time, from here: the same command with {LONGER}")
    if found["cases"] and not options.no_plots:
        limit = command_start.BEGIN + PLOTTED if options.quick and not options.seconds else None
        draw_or_say(found, options.out, limit)
    return status or int(bool(failed))


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastrl bench",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def several(group: argparse._ArgumentGroup, option: str, **rest: Any) -> None:
        group.add_argument(option, nargs="+", **{"metavar": "NAME", **rest})

    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--quick",
        action="store_true",
        help="a selection that ends within two minutes, on two cores with most of its cases: "
        "torch.compile in two of them, and on a CPU without the peer torch",
    )
    what.add_argument(
        "--smoke", action="store_true", help="tiny shapes, to see whether it all runs"
    )
    several(what, "--op", choices=OPS, help="operators; --list has them")
    several(what, "--model", choices=MODELS, help="shapes of these models")
    several(what, "--rows", type=_positive(int), metavar="N", help="tokens in all")
    several(what, "--dtype", choices=DTYPES, help="of logits or hidden states")
    several(what, "--variant", metavar="TEXT", help="such as 'frozen head'; '' is none")
    passes = "forward, backward, both; default: forward both (--quick: both)"
    several(what, "--pass", dest="steps", choices=PASSES, metavar="PASS", help=passes)
    who = parser.add_argument_group("who takes part")
    several(who, "--backend", choices=BACKENDS, help="fastrl's; default: all")
    several(who, "--peer", help="default: all that are installed; 'none' is none")
    who.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    how = parser.add_argument_group("how")
    how.add_argument("--rounds", type=_positive(int), help="timed turns of a provider")
    how.add_argument("--seconds", type=_positive(float), metavar="S", help="limit of the whole run")
    how.add_argument(
        "--patience", type=_positive(float), metavar="S",
        help="limit of one provider's first call, compilation included; "
        "default: 150 (--quick: 25)",
    )  # fmt: skip
    how.add_argument("--out", type=Path, default=Path("fastrl-bench"), metavar="DIR")
    how.add_argument("--resume", action="store_true", help="keep what DIR has, and go on")
    how.add_argument("--no-plots", action="store_true", help="JSON and Markdown alone")
    how.add_argument("--list", action="store_true", help="list operators, models, backends, peers")
    return parser


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        with contextlib.suppress(ValueError):
            if (found := kind(text)) > 0:
                return found
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")

    return number


def _settings(options: argparse.Namespace) -> Settings:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no GPU that torch can use")
    selection = "smoke" if options.smoke else f"quick-{device}" if options.quick else device
    for name in options.backend or ():
        if (why := unavailable(name)) is not None:
            raise ValueError(f"--backend {name}: {why}")
    sizes = _chosen(selection, device, options)
    plan = Plan(rounds=2, warmup=1, sets=2, seconds=0.5) if options.smoke else Plan()
    if options.quick:
        plan = Plan(rounds=11, warmup=2, sets=2, seconds=3.0, least=1, hurried=True)
    if options.rounds:
        plan = plan._replace(rounds=options.rounds, seconds=float("inf"))
    peers = () if options.peer == ["none"] else options.peer
    if peers is None and options.quick and device == "cpu":
        # torch's linear_cross_entropy takes seconds a call there
        peers = [name for name in PEERS if name != "torch" and is_installed(name)]
    return Settings(
        sizes=sizes,
        steps=tuple(options.steps or ((BOTH,) if options.quick else (FORWARD, BOTH))),
        device=device,
        backends=None if options.backend is None else tuple(options.backend),
        peers=None if peers is None else tuple(peers),
        plan=plan,
        tiny=options.smoke,
        sparing=options.quick and options.peer is None,
    )


def _chosen(selection: str, device: str, options: argparse.Namespace) -> tuple[Size, ...]:
    """Choose from a selection, with the sizes that were asked for in the place of its own."""
    sizes = SELECTIONS[selection]
    listed = {size.op for size in sizes}
    others = [size for size in SELECTIONS[device] if size.op not in listed]
    kept = [size for size in [*sizes, *others] if size.op in (options.op or listed)]
    found: dict[Size, None] = {}
    for size in kept:
        if options.variant is not None and size.variant not in options.variant:
            continue
        models = [name if size.model else "" for name in options.model or [size.model]]
        dtypes = [getattr(torch, name) for name in options.dtype or ()] or [size.dtype]
        for model, rows, dtype in itertools.product(models, options.rows or [size.rows], dtypes):
            found[size._replace(model=model, rows=rows, dtype=dtype)] = None
    if not found:
        raise ValueError("--op and --variant leave nothing to measure; --list has what there is")
    return tuple(found)


def _by_number(text: str) -> list[tuple[str, int]]:
    """Return a key that sorts words by the alphabet, and numbers by size."""
    return [(word, int(number or 0)) for word, number in re.findall(r"(\D+)?(\d*)", text)]


def _listing() -> str:
    every = [size for sizes in SELECTIONS.values() for size in sizes]
    lines = ["operators, and their variants in quotes:"]
    for op in OPS:
        variants = {size.variant for size in every if size.op == op and size.variant}
        lines.append(f"  {op:<24}{', '.join(map(repr, sorted(variants, key=_by_number)))}")
    lines.append("models (hidden x vocabulary):")
    lines += [f"  {name:<14}{one.hidden} x {one.vocabulary}" for name, one in MODELS.items()]
    lines.append("backends here:")
    lines += [f"  {name:<14}{unavailable(name) or 'works'}" for name in BACKENDS]
    lines.append("peers, and what pip calls them:")
    for name, (*_, distribution) in PEERS.items():
        missing = "" if is_installed(name) else " (not installed)"
        lines.append(f"  {name:<20}{distribution}{missing}")
    return "\n".join(lines)
