"""The time of a kernel for other values of the constants that it is launched with, on a GPU.

    python bench/gpu_tuning.py [--knobs lanes chunk ...] [--out build/gpu/tune] [--seconds 450]
    python bench/gpu_tuning.py --smoke         # the same code on tiny shapes, on a CPU

Each value is tried in a process of its own, which sets it before anything is compiled and times the
cases of gpu_cases.py that depend on it, beside a copy or the bare GEMMs: the column `/ floor` is
free of what the machine does meanwhile. Small cases are the time of their kernels, replayed from a
graph. A result that is not within its error is a row without a time. OUT/tuning.jsonl and
OUT/tuning.md have what is known after every case. The constants of csrc/cuda are compiled in: edit,
`make gpu-build`, and compare `python bench/gpu.py --only ...`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_cases import SHAPES, items
from gpu_item import Item
from gpu_journal import is_cut, whole_lines
from gpu_linear import TRAINED
from gpu_logits import LOSS, STATS, STATS_GRADIENT
from gpu_timing import Measured, Plan, measure, replayed

FLOORS = ("copy", "copies", "bare GEMMs")
MIB = 2**20
#: An error above it is a wrong result: gradients in bfloat16 are rounded to 2^-9 of the largest.
WRONG = 0.02
SAME = 0.02  # of a time: less is no difference between two runs
SILENT_SECONDS = 90.0  # that one value may take, compilation included


class Knob(NamedTuple):
    """A constant: the modules that hold it, its values, and what depends on it."""

    name: str
    modules: tuple[str, ...]
    values: tuple[int, ...]
    backends: tuple[str, ...]
    works: tuple[str, ...]
    shapes: tuple[str, ...] = ("",)  # contained in the label of a case; '' is in all


_ROWS = "fastrl.triton.vocabulary.rows"
_SWEEPS = [f"fastrl.triton.vocabulary.row_{name}" for name in ("sums", "gradient", "loads")]
_CHUNKS = "fastrl.ops._linear.chunks"
_LARGE = ("8192 x 151936 bf", "8192 x 32768 bf", "4096 x 50257 bf")
_FEW = ("64 x 151936 bf", "256 x 151936 bf")
_LOGITS = (STATS, STATS_GRADIENT, LOSS)
_TOKENS = ("loss and gradient, token level",)
KNOBS = {
    "lanes": Knob("MOST_LANES", (_ROWS,), (128, 256, 512, 1024), ("triton",), _LOGITS, _LARGE),
    "columns": Knob(
        "COLUMNS_PER_LANE", (_ROWS, *_SWEEPS), (16, 32, 64), ("triton",), _LOGITS, _LARGE
    ),
    # rows are shared by several programs, by so many that these are the same places
    "resident": Knob("RESIDENT", (_ROWS,), (1, 2, 3, 4), ("triton",), (LOSS,), _FEW[:1]),
    "even": Knob(
        "EVEN", ("fastrl.triton.vocabulary.token_stats",), (2, 4, 8, 16), ("triton",),
        (STATS_GRADIENT,), _FEW,
    ),
    "chunk": Knob(
        # a larger chunk that costs no peak is the default: smaller limits would not show
        "_GPU_CHUNK_BYTES", (_CHUNKS,), tuple(n * MIB for n in (508, 1020, 2044)),
        ("triton", "cuda"), (TRAINED,),
    ),
    "gae": Knob(
        "BLOCK", ("fastrl.triton.gae.gae",), (1024, 2048, 4096), ("triton",), ("GAE with a mask",)
    ),
    "tokens": Knob(
        "BLOCK", ("fastrl.triton.tokens.policy_loss",), (512, 1024, 2048), ("triton",), _TOKENS
    ),
    "programs": Knob(
        "MOST_PROGRAMS", ("fastrl.triton.tokens.policy_loss",), (256, 512, 1024), ("triton",),
        _TOKENS,
    ),
    "cpu chunk": Knob("_CPU_CHUNK_BYTES", (_CHUNKS,), (512, 192 * MIB), ("cpu",), (TRAINED,)),
}  # fmt: skip


def main() -> int:
    given = _options()
    if given.value is not None:
        for row in _rows(given.knobs[0], given.value, smoke=given.smoke):
            print(json.dumps(row), flush=True)
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    journal = given.out / "tuning.jsonl"
    journal.write_text("")
    end, failed = time.monotonic() + given.seconds, []
    for name in given.knobs:
        for value in KNOBS[name].values:
            left = end - time.monotonic()
            reason = _try(given, name, value, min(left, SILENT_SECONDS)) if left > 0 else "no time"
            if reason:
                failed.append(f"- {name} {value}: {reason}")
            with_reasons = [*table(whole_lines(journal)), *failed]
            (given.out / "tuning.md").write_text("\n".join(with_reasons) + "\n")
    print((given.out / "tuning.md").read_text(), end="")
    return int(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--knobs", nargs="+", choices=KNOBS, help="default: all of a GPU")
    parser.add_argument("--out", type=Path, default=Path("build/gpu/tune"))
    parser.add_argument("--seconds", type=float, default=450.0, help="limit of the whole run")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--value", type=int, help="try this one, here")
    given = parser.parse_args()
    place = {True: "cpu", False: "triton"}[given.smoke]
    given.knobs = given.knobs or [name for name in KNOBS if place in KNOBS[name].backends]
    if not given.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; --smoke runs the same code on the CPU")
    return given


def _try(given: argparse.Namespace, name: str, value: int, seconds: float) -> str:
    """Try a value in a process of its own, whose rows are kept; return why it failed, or ''."""
    command = [sys.executable, __file__, "--knobs", name, "--value", str(value)]
    command += ["--smoke"] if given.smoke else []
    journal = given.out / "tuning.jsonl"
    with journal.open("a") as out, (given.out / "tuning.log").open("a") as log:
        out.write("\n" * is_cut(journal))
        out.flush()
        try:
            done = subprocess.run(command, stdout=out, stderr=log, check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"took longer than {seconds:.0f} s"
    return f"exit status {done.returncode}, see tuning.log" if done.returncode else ""


def _rows(name: str, value: int, *, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of each case that depends on a knob, with a value of it."""
    knob, device = KNOBS[name], torch.device("cpu" if smoke else "cuda")
    default = set_constant(knob, value)
    for item in items(SHAPES["smoke" if smoke else "gpu"], device):
        case = item.make()
        if case.work not in knob.works or not any(shape in case.label for shape in knob.shapes):
            continue
        chosen = (*FLOORS, *(f"fastrl {backend}" for backend in knob.backends))
        case = case._replace(providers=[p for p in case.providers if p.name in chosen])
        plan = Plan(1, 2, 2, 0.1) if smoke else Plan(samples=20)
        found = measure(case, device, plan, {}, lambda _: None, small=False)
        times = dict(_times(item, case, found, device))
        floor = next((times[name] for name in FLOORS if name in times), None)
        for one in found:
            if one.provider not in FLOORS:
                wrong = one.error is not None and not one.error < WRONG
                yield {
                    "knob": name, "value": value, "default": value == default,
                    "case": f"{case.label}: {case.work}", "provider": one.provider,
                    "milliseconds": None if wrong else times.get(one.provider), "floor": floor,
                    "peak": one.peak, "error": one.error, "failure": one.failure,
                }  # fmt: skip


def set_constant(knob: Knob, value: int) -> int:
    """Set a constant in all modules that hold it; return what it was."""
    modules = [importlib.import_module(module) for module in knob.modules]
    old = getattr(modules[0], knob.name)
    for module in modules:
        setattr(module, knob.name, type(old)(value))
    return int(getattr(old, "value", old))


def _times(
    item: Item, case: Any, found: list[Measured], device: torch.device
) -> Iterator[tuple[str, float]]:
    providers = {provider.name: provider for provider in case.providers}
    for one in found:
        if one.samples and item.small:
            yield one.provider, replayed(providers[one.provider], case, device)
        elif one.samples:
            yield one.provider, statistics.median(one.samples)


def _relative(row: dict[str, Any]) -> float:
    """Return the time over the floor's, which the same process measured."""
    return row["milliseconds"] / (row["floor"] or 1.0)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows by case, the default and the fastest values marked."""
    lines = ["| case | knob | value | ms | / floor | peak MiB | error | |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["provider"], row["knob"]), []).append(row)
    for (case, provider, knob), some in groups.items():
        timed = [row for row in some if row["milliseconds"] is not None]
        least = min(map(_relative, timed), default=0.0)
        for row in some:
            took, floor = row["milliseconds"], row["floor"]
            error = "" if row["error"] is None else f"{row['error']:.1e}"
            fastest = took is not None and _relative(row) <= (1 + SAME) * least
            marks = ["default"] * row["default"] + ["fastest"] * fastest
            cells = [
                f"{case}, {provider}", knob, str(row["value"]),
                f"{took:.4g}" if took is not None else row["failure"] or "wrong",
                f"{took / floor:.3f}" if took is not None and floor else "",
                f"{row['peak'] / MIB:.1f}", error, ", ".join(marks),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
