"""`make bench`: fastrl against eager torch, torch.compile, Python loops and a copy, as ratios.

Every case is one interleaved run (see timing.py). For each provider the table has median and
spread, bandwidth in terms of the minimum of bytes that the work must move, error against float64,
and time relative to fastrl's cpu backend.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
from pathlib import Path

import bench_divergence
import bench_gae
import bench_group_advantages
import bench_kept_tokens
import bench_linear
import bench_linear_skipped_rows
import bench_logits_policy_loss
import bench_policy_loss
import bench_token_stats
import torch
from shapes import SELECTIONS
from timing import AT_MOST, Case, Timing, measure, ratio

MODULES = (
    bench_token_stats,
    bench_logits_policy_loss,
    bench_linear,
    bench_linear_skipped_rows,
    bench_kept_tokens,
    bench_divergence,
    bench_policy_loss,
    bench_gae,
    bench_group_advantages,
)
RESULTS = Path(__file__).parent / "results"

# Targets on the shapes named `issue`: op, alone or with a dtype -> kind of provider -> minimum
# speedup; for the kinds in AT_MOST, the maximum of fastrl's time relative to it.
REQUIRED = {
    "token_stats": {"compile": 2.0, "eager": 4.0},
    "logits_policy_loss": {"compile": 5.0, "eager": 7.0, "floor": 2.5},
    "linear_policy_loss": {"floor": 1.25, "peer": 2.5, "same rows": 1.15, "all rows": 2.5},
    "linear_policy_loss bfloat16": {"peer": 5.0},
    "linear_policy_loss, 32 kept": {"all rows": 8.0},
    "linear_policy_loss, 512 kept": {"all rows": 1.0},
    "divergence, forward KL": {"floor": 1.15},
    "divergence, reverse KL": {"floor": 1.15},
    "divergence, Jensen-Shannon": {"floor": 1.15},
    "divergence, forward KL float32": {"peer": 2.0},
    "divergence, reverse KL float32": {"peer": 2.0},
    "divergence, Jensen-Shannon float32": {"peer": 2.0},
    "linear_policy_loss, a teacher": {"same rows": 1.4},
    "gae": {"loop": 200.0},
}


def main() -> int:
    options = _options()
    cases = [case for module in MODULES for case in module.cases(options.shapes)]
    cases = [case for case in cases if options.only in f"{case.label} {case.work}"]
    lines = [f"{_machine()}", f"Command: `{' '.join(['python', *sys.argv])}`", ""]
    print("\n".join(lines), flush=True)
    records, failed = [], False
    for case in cases:
        if options.without_compile:
            kept = [provider for provider in case.providers if provider.kind != "compile"]
            case = case._replace(providers=kept)
        timings = measure(case, rounds=options.rounds, warmup=options.warmup, sets=options.sets)
        failed = failed or any(timing.failure for timing in timings)
        section = _table(case, timings)
        if options.shapes == "issue":
            section += _verdicts(case, timings)
        print("\n".join(section), flush=True)
        lines += section
        records.append(_record(case, timings))
    if options.save:
        _save(lines, records)
    return int(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=SELECTIONS, default="issue", help="see shapes.py")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--rounds", type=int, default=21, help="timed calls per provider")
    parser.add_argument("--warmup", type=int, default=3, help="untimed calls per provider")
    parser.add_argument("--sets", type=int, default=3, help="input sets that calls rotate over")
    parser.add_argument("--without-compile", action="store_true", help="skip torch.compile")
    parser.add_argument("--save", action="store_true", help="write bench/results/cpu-<date>.*")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see if it all runs")
    options = parser.parse_args()
    if options.smoke:
        options.shapes, options.rounds, options.warmup = "smoke", 2, 1
        options.without_compile = True
    return options


def _table(case: Case, timings: list[Timing]) -> list[str]:
    lines = [
        f"### {case.label}: {case.work}",
        "",
        "| provider | median ms (20-80 %) | GB/s | error | time / fastrl cpu |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    ours = _ours(timings)
    for timing in timings:
        if timing.failure:
            lines.append(f"| {timing.provider} | - | - | - | not run: {timing.failure} |")
            continue
        low, high = timing.quantiles()
        error = "" if math.isnan(timing.error) else f"{timing.error:.1e}"
        times = f"{ratio(timing, ours):.2f}" if ours else ""
        lines.append(
            f"| {timing.provider} | {timing.median * 1e3:.3g} "
            f"({low * 1e3:.3g}-{high * 1e3:.3g}) "
            f"| {case.bytes_moved / timing.median / 1e9:.1f} | {error} | {times} |"
        )
    return [*lines, ""]


def _verdicts(case: Case, timings: list[Timing]) -> list[str]:
    """One line per target, against the fastest provider of each kind."""
    lines, ours = [], _ours(timings)
    of_dtype = f"{case.op} {str(case.dtype).removeprefix('torch.')}"
    required = {**REQUIRED.get(case.op, {}), **REQUIRED.get(of_dtype, {})}
    for kind, bound in required.items():
        others = [timing for timing in timings if timing.kind == kind and timing.seconds]
        if not others or ours is None:
            continue
        other = min(others, key=lambda timing: timing.median)
        if kind in AT_MOST:
            value = ratio(ours, other)
            met, wanted = value <= bound, f"at most {bound:g}"
            what = f"takes {value:.2f} times as long as the {other.provider}"
        else:
            value = ratio(other, ours)
            met, wanted = value >= bound, f"at least {bound:g}"
            what = f"is {value:.3g} times as fast as {other.provider}"
        lines.append(f"- {'met' if met else 'MISSED'}: fastrl cpu {what} (target: {wanted})")
    return [*lines, ""] if lines else []


def _ours(timings: list[Timing]) -> Timing | None:
    return next((t for t in timings if t.kind == "fastrl cpu" and t.seconds), None)


def _record(case: Case, timings: list[Timing]) -> dict[str, object]:
    fields = ("op", "work", "shape", "bytes_moved")
    kept = {name: getattr(case, name) for name in fields}
    return {**kept, "dtype": str(case.dtype), "timings": [timing._asdict() for timing in timings]}


def _machine() -> str:
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
        model = names[0].split(":", 1)[1].strip() if names else model
    return (
        f"{model}, {torch.get_num_threads()} threads of {os.cpu_count()} "
        f"({torch.backends.cpu.get_cpu_capability()}), Python {platform.python_version()}, "
        f"torch {torch.__version__}, {datetime.date.today()}"
    )


def _save(lines: list[str], records: list[dict[str, object]]) -> None:
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"cpu-{datetime.date.today()}"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    report = {"machine": lines[0], "command": lines[1], "cases": records}
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {stem.with_suffix('.md')} and .json")


if __name__ == "__main__":
    sys.exit(main())
