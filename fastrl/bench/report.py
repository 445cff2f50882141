"""Results of a run as JSON and as Markdown."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastrl.bench.conditions import COPY, OTHERS
from fastrl.bench.machine import CEILINGS
from fastrl.bench.timing import LATE

Results = dict[str, Any]
Row = dict[str, Any]
FEW_ROUNDS = 5  # fewer have no percentiles
DIGITS = 4  # of a time in results.json


def cut(case: Row) -> Row:
    """Return a case of which only some providers have been timed."""
    rows = case["providers"]
    return case | {
        "providers": [
            row if row["seconds"] or row["failure"] else row | {"failure": LATE} for row in rows
        ]
    }


def late(found: Results) -> list[str]:
    """Return the cases, and the providers of a case, that were not measured in time."""
    lines = [name for name, why in found["not_run"].items() if why == LATE]
    for case in found["cases"]:
        names = [row["name"] for row in case["providers"] if row["failure"] == LATE]
        lines += [f"{case['name']}: {', '.join(names)}"] if names else []
    return lines


def write(found: Results, folder: Path) -> None:
    """Replace ``results.json`` and ``results.md`` as a whole, so that they are never cut."""
    for name, text in (("results.json", as_json(found)), ("results.md", markdown(found))):
        new = folder / f"{name}.new"
        new.write_text(text)
        new.replace(folder / name)


def as_json(found: Results) -> str:
    """Return results with one provider per line, which diffs show well."""
    head = {name: value for name, value in found.items() if name != "cases"}
    cases = []
    for case in found["cases"]:
        own = {name: value for name, value in case.items() if name != "providers"}
        rows = ",\n   ".join(json.dumps(row) for row in case["providers"])
        cases.append(f'{json.dumps(own)[:-1]},\n  "providers": [\n   {rows}]}}')
    listed = ",\n ".join(cases)
    return f'{json.dumps(head, indent=1)[:-2]},\n "cases": [\n {listed}\n]}}\n'


def record(case: Mapping[str, Any], rows: list[Row]) -> Row:
    """Return a case as it is kept, its times rounded to the digits that mean something."""
    for row in rows:
        row["seconds"] = {
            str(turn): float(f"{seconds:.{DIGITS}g}") for turn, seconds in row["seconds"].items()
        }
    return {**case, "providers": rows}


def median(row: Row) -> float:
    """Return the median time of a provider, in seconds."""
    return float(statistics.median(row["seconds"].values()))


def spread(seconds: Iterable[float]) -> tuple[float, float, float]:
    """Return the median, and the 20th and 80th percentile."""
    ordered = sorted(seconds)
    low, high = ordered[len(ordered) // 5], ordered[len(ordered) * 4 // 5]
    return statistics.median(ordered), low, high


def ratio(other: Row, ours: Row) -> float:
    """Return the time of ``other`` over that of ``ours``, paired by round."""
    both = other["seconds"].keys() & ours["seconds"].keys()
    pairs = (other["seconds"][turn] / ours["seconds"][turn] for turn in both)
    return float(statistics.median(pairs))


def fastest(case: Row, *kinds: str) -> Row | None:
    """Return the fastest provider of these kinds, or None; by default of fastrl out of place."""
    of_kinds = [row for row in case["providers"] if row["kind"] in (kinds or ("fastrl",))]
    timed = [row for row in of_kinds if row["seconds"] and not row["failure"]]
    return min(timed, key=median, default=None)


def failures_of_fastrl(found: Results) -> list[str]:
    """Return every failed call of fastrl; what failed in a peer stands in the table alone."""
    return [
        f"{case['name']}: {row['name']}: {row['failure']}"
        for case in found["cases"]
        for row in case["providers"]
        if row["kind"].startswith("fastrl") and row["failure"] not in ("", LATE)
    ]


def markdown(found: Results) -> str:
    """Return results as a document."""
    lines = ["# fastrl bench", ""]
    lines += [f"- {name}: {value}" for name, value in found["machine"].items() if value]
    lines += [f"- {name}: {value:.3g}" for name, value in found[CEILINGS].items()]
    lines += [f"- command: `{found['command']}`", f"- date: {found['date']}", "", *NOTES, ""]
    for case in found["cases"]:
        lines += section(case, found[CEILINGS], ratios=not found.get("tiny"))
    if found["not_run"]:
        lines += ["Not run:", ""]
        lines += [f"- {name}: {why}" for name, why in found["not_run"].items()]
    return "\n".join(lines).rstrip() + "\n"


NOTES = [
    "Times are medians over interleaved rounds, with the 20th and 80th percentile. A ratio is the",
    "median over rounds of two times of the same round. GB/s and TFLOP/s count the least that the",
    "work needs, the same for all providers; % is the share of this machine's own copy or GEMM.",
    "Memory is the peak of a call beyond its inputs. Errors are against float64: log-probabilities",
    "relative to their size (or 1), gradients relative to their largest element, in 64 rows. A",
    "virtual machine changes while it is measured: compare two runs in which copies were as fast,",
    "and in which others (programs, or machines of the same host) took none of the cores.",
]


def show(text: str, *, kept: bool = True) -> None:
    """Say how far a command is; where it is no terminal only what is to be ``kept``."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1  # 79 where a terminal has no size
        sys.stderr.write(f"\r{text[:width]:<{width}}\r")
    elif kept:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def head(columns: Sequence[str]) -> list[str]:
    """Return the head of a table whose columns, except for the first one, are numbers."""
    return [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]


def _digits(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


def section(case: Row, ceilings: Mapping[str, float], *, ratios: bool = True) -> list[str]:
    """Return the table of a case; ``ratios`` to fastrl's time mean nothing for tiny shapes."""
    gemms = bool(case["flops"])
    ceiling = f"{case['dtype']} GEMM TFLOP/s" if gemms else COPY
    ours, split = fastest(case), any(row["kernels"] for row in case["providers"])
    columns = ["provider", "ms (20-80 %)", *(["time / fastrl"] if ratios else [])]
    columns += ["TFLOP/s" if gemms else "GB/s", "peak MB", "error"]
    if ceilings.get(ceiling):
        columns[-3] += " (%)"
    columns += ["kernels us", "host us"] if split else []
    lines = [f"## {case['name']}", "", *head(columns)]
    for row in case["providers"]:
        if row["failure"] or not row["seconds"]:
            why = row["failure"].replace("|", "/") or "not timed"
            lines.append(f"| {row['name']} | {why} |" + " |" * (len(columns) - 2))
            continue
        took, low, high = spread(row["seconds"].values())
        rounds = len(row["seconds"])
        varied = f"{_digits(low * 1e3)}-{_digits(high * 1e3)}"
        if rounds < FEW_ROUNDS:
            varied = f"{rounds} round{'s' * (rounds > 1)}"
        rate = case["flops"] / took / 1e12 if gemms else case["bytes_moved"] / took / 1e9
        share = f" ({rate / ceilings[ceiling]:.0%})" if ceilings.get(ceiling) else ""
        cells = [
            row["name"],
            f"{_digits(took * 1e3)} ({varied})",
            *([f"{ratio(row, ours):.2f}" if ours else ""] if ratios else []),
            "" if row["kind"] == "floor" else f"{rate:.3g}{share}",
            "" if row["peak"] is None else f"{row['peak'] / 1e6:.1f}",
            "" if row["error"] is None else f"{row['error']:.1e}",
        ]
        if split:
            cells += [f"{row[name] * 1e6:.1f}" if row[name] else "" for name in ("kernels", "host")]
        lines.append(f"| {' | '.join(cells)} |")
    if COPY in case:
        others = f", {case[OTHERS]:.1%} of the cores taken by others" if OTHERS in case else ""
        lines += ["", f"While this was timed: copies {case[COPY]:.3g} GB/s{others}."]
    return [*lines, ""]
