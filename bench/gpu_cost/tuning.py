"""The time of a kernel for other values of the constants that it is launched with, on a GPU.

    python bench/gpu_cost/tuning.py [--knobs lanes chunk ...] [--out build/gpu/tune] [--seconds 450]
    python bench/gpu_cost/tuning.py --smoke         # the same code on tiny shapes, on a CPU

Each value is tried in a process of its own, which sets it before anything is compiled and times the
cases that depend on it, beside a copy or the bare GEMMs: the column `/ floor` is free of what the
machine does meanwhile. Cases bound by launches are the time of their kernels. A result that is not
within its error is a row without a time. OUT/tuning.jsonl and OUT/tuning.md have what is known
after every value. The constants of csrc/cuda are compiled in: edit, `make gpu-build`, and compare
runs of `fastrl bench --backend cuda`.
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

from fastrl.bench.case import BOTH, FORWARD
from fastrl.bench.cases import Size, cases
from fastrl.bench.timing import Measured, Plan, measure

MIB = 2**20
#: An error above it is a wrong result: gradients in bfloat16 are rounded to 2^-9 of the largest.
WRONG = 0.02
SAME = 0.02  # of a time: less is no difference between two runs
SILENT_SECONDS = 90.0  # that one value may take, compilation included
BF16, FP32 = torch.bfloat16, torch.float32


class Knob(NamedTuple):
    """A constant: the modules that hold it, its values, and what depends on it."""

    name: str
    modules: tuple[str, ...]
    values: tuple[int, ...]
    sizes: tuple[Size, ...]
    backends: tuple[str, ...] = ("triton",)


_ROWS = "fastrl.triton.vocabulary.rows"
_SWEEPS = [f"fastrl.triton.vocabulary.row_{name}" for name in ("sums", "gradient", "loads")]
_CHUNKS = "fastrl.ops._rows.order"
_LARGE = tuple(
    Size(op, model, 8192, BF16)
    for op in ("token_stats", "logits_policy_loss")
    for model in ("qwen3-0.6b", "mistral-7b", "gpt2")
)
_FEW = tuple(Size("token_stats", "qwen3-0.6b", rows, BF16) for rows in (64, 256))
_HEADS = tuple(
    Size("linear_policy_loss", model, 8192, BF16) for model in ("llama-3.1-8b", "qwen2.5-0.5b")
)


def _tokens(op: str, *shapes: tuple[int, int]) -> tuple[Size, ...]:
    return tuple(Size(op, "", B * T, FP32, f"{T} tokens each") for B, T in shapes)


_GAE = _tokens("gae", (16, 131072), (8192, 2048))
_TOKENS = _tokens("policy_loss", (16, 4096), (64, 16384))
_TINY = (Size("linear_policy_loss", "tiny", 16, FP32),)
KNOBS = {
    "lanes": Knob("MOST_LANES", (_ROWS,), (128, 256, 512, 1024), _LARGE),
    "columns": Knob("COLUMNS_PER_LANE", (_ROWS, *_SWEEPS), (16, 32, 64), _LARGE),
    # rows are shared by several programs, by so many that these are the same places
    "resident": Knob(
        "RESIDENT", (_ROWS,), (1, 2, 3, 4), (Size("logits_policy_loss", "qwen3-0.6b", 64, BF16),)
    ),
    "even": Knob("EVEN", ("fastrl.triton.vocabulary.token_stats",), (2, 4, 8, 16), _FEW),
    # a larger chunk that costs no peak is the default: smaller limits would not show
    "chunk": Knob(
        "_GPU_CHUNK_BYTES", (_CHUNKS,), tuple(n * MIB for n in (508, 1020, 2044)), _HEADS,
        ("triton", "cuda"),
    ),
    "gae": Knob("BLOCK", ("fastrl.triton.gae.gae",), (1024, 2048, 4096), _GAE),
    "tokens": Knob("BLOCK", ("fastrl.triton.tokens.policy_loss",), (512, 1024, 2048), _TOKENS),
    "programs": Knob(
        "MOST_PROGRAMS", ("fastrl.triton.tokens.policy_loss",), (256, 512, 1024), _TOKENS
    ),
    "cpu chunk": Knob("_CPU_CHUNK_BYTES", (_CHUNKS,), (512, 192 * MIB), _TINY, ("cpu",)),
}  # fmt: skip


def main() -> int:
    given = _options()
    if given.value is not None:
        for row in _rows(given.knobs[0], given.value, smoke=given.smoke):
            print(json.dumps(row), flush=True)
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    end, rows, failed = time.monotonic() + given.seconds, [], []
    for name in given.knobs:
        for value in KNOBS[name].values:
            left = min(SILENT_SECONDS, end - time.monotonic())
            found, why = _try(given, name, value, left) if left > 0 else ([], "no time")
            rows += found
            failed += [f"- {name} {value}: {why}"] if why else []
            (given.out / "tuning.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in rows))
            (given.out / "tuning.md").write_text("\n".join([*table(rows), *failed]) + "\n")
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
    place = "cpu" if given.smoke else "triton"
    given.knobs = given.knobs or [name for name in KNOBS if place in KNOBS[name].backends]
    if not given.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; --smoke runs the same code on the CPU")
    return given


def _try(
    given: argparse.Namespace, name: str, value: int, seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """Try a value in a process of its own; return its rows and why it failed, or ''."""
    command = [sys.executable, __file__, "--knobs", name, "--value", str(value)]
    command += ["--smoke"] if given.smoke else []
    with (given.out / "tuning.log").open("a") as log:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            said, why = running.communicate(timeout=seconds)[0], ""
        except subprocess.TimeoutExpired:
            running.kill()
            said, why = running.communicate()[0], f"took longer than {seconds:.0f} s"
    if running.returncode and not why:
        why = f"exit status {running.returncode}, see tuning.log"
    return [json.loads(line) for line in said.splitlines() if line.endswith("}")], why


def _rows(name: str, value: int, *, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of each case that depends on a knob, with a value of it."""
    knob, device = KNOBS[name], torch.device("cpu" if smoke else "cuda")
    default = set_constant(knob, value)
    plan = Plan(2, 1, 2, 0.1) if smoke else Plan(rounds=20)
    left = cases(knob.sizes, (FORWARD, BOTH), device, knob.backends, ())
    while left:
        case = left.pop(0)  # and with it what it holds
        *ours, floor = measure(case, device, plan)
        for one in ours:
            wrong = one.error is not None and not one.error < WRONG
            seconds = None if one.failure or wrong else _time(one)
            yield {
                "knob": name, "value": value, "default": value == default, "case": case.name,
                "provider": one.name, "seconds": seconds, "floor": _time(floor),
                "peak": one.peak, "error": one.error, "failure": one.failure,
            }  # fmt: skip


def set_constant(knob: Knob, value: int) -> int:
    """Set a constant in all modules that hold it; return what it was."""
    modules = [importlib.import_module(module) for module in knob.modules]
    old = getattr(modules[0], knob.name)
    for module in modules:
        setattr(module, knob.name, type(old)(value))
    return int(getattr(old, "value", old))


def _time(one: Measured) -> float | None:
    if not one.seconds:
        return None
    return statistics.median(one.seconds.values()) if one.kernels is None else one.kernels


def _relative(row: dict[str, Any]) -> float:
    """Return the time over the floor's, which the same process measured."""
    return row["seconds"] / (row["floor"] or 1.0)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows by case, the default and the fastest values marked."""
    lines = ["| case | knob | value | ms | / floor | peak MB | error | |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["provider"], row["knob"]), []).append(row)
    for (case, provider, knob), some in groups.items():
        least = min((_relative(row) for row in some if row["seconds"]), default=0.0)
        for row in some:
            took = row["seconds"]
            fastest = took is not None and _relative(row) <= (1 + SAME) * least
            marks = ["default"] * row["default"] + ["fastest"] * fastest
            cells = [
                f"{case}, {provider}", knob, str(row["value"]),
                row["failure"] or "wrong" if took is None else f"{took * 1e3:.4g}",
                "" if took is None or not row["floor"] else f"{_relative(row):.3f}",
                "" if row["peak"] is None else f"{row['peak'] / 1e6:.1f}",
                "" if row["error"] is None else f"{row['error']:.1e}", ", ".join(marks),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
