"""The tables of bench/gpu.py, from what a run has found so far."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

Entry = dict[str, Any]


def markdown(entries: list[Entry]) -> str:
    """Return everything that a run has found, as one document."""
    results = {one["job"]: one for one in entries if "result" in one or "failure" in one}
    graphs = {job: one for job, one in results.items() if job.startswith("graph ")}
    lines = head(entries)
    for job, one in results.items():
        if job.isdigit():
            lines += section(job, one, graphs)
    lines += [f"- not run, out of time: {one['not_run']}" for one in entries if "not_run" in one]
    return "\n".join([*lines, "", *targets(results)]) + "\n"


def head(entries: list[Entry]) -> list[str]:
    """Return the machine, its versions, and what it can do."""
    lines = []
    for one in entries:
        if "machine" in one:
            lines += [f"- {name}: {value}" for name, value in one["machine"].items()]
            lines.append(f"- command: `{one['command']}`")
        elif one.get("job") in ("anchors", "lengths") and "result" in one:
            lines += [f"- {name}: {value:.3g}" for name, value in one["result"].items()]
        elif one.get("job") in ("anchors", "lengths") and "failure" in one:
            lines.append(f"- {one['job']}: {one['failure']}")
    return [*lines, ""]


def section(job: str, entry: Entry, graphs: dict[str, Entry]) -> list[str]:
    """Return the table of a case; `graphs` are the times of its kernels alone."""
    if "failure" in entry:
        return [f"- {job}: {entry['failure']}"] if not job.startswith("graph ") else []
    case = entry["result"]
    if "providers" not in case:
        return []
    rate = "TFLOP/s" if case["flops"] else "GB/s"
    columns = ["provider", "ms (20-80 %)", rate, "peak MiB", "error", "time / fastrl"]
    columns += ["kernels us", "host us"] if case["small"] else []
    lines = [f"### {case['label']}: {case['work']}", "", f"| {' | '.join(columns)} |"]
    lines.append(f"| --- |{' ---: |' * (len(columns) - 1)}")
    ours = next((median(one) for one in case["providers"] if _is_ours(one)), None)
    for one in case["providers"]:
        if one["failure"] or not one["samples"]:
            lines.append(f"| {one['provider']} | {one['failure']} |" + " |" * (len(columns) - 2))
            continue
        ordered = sorted(one["samples"])
        low, high = ordered[len(ordered) // 5], ordered[len(ordered) * 4 // 5]
        took = median(one)
        work = case["flops"] / 1e9 if case["flops"] else case["bytes_moved"] / 1e6
        cells = [
            one["provider"],
            f"{took:.4g} ({low:.4g}-{high:.4g})",
            f"{work / took:.0f}",
            f"{one['peak'] / 2**20:.1f}",
            "" if one["error"] is None else f"{one['error']:.1e}",
            f"{took / ours:.2f}" if ours else "",
        ]
        if case["small"]:
            host = "" if one["host"] is None else f"{one['host'] * 1e3:.1f}"
            cells += [_kernels(graphs.get(f"graph {job} {one['provider']}")), host]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def median(provider: Entry) -> float:
    return statistics.median(provider["samples"])


def _is_ours(provider: Entry) -> bool:
    return provider["kind"].startswith("fastrl") and bool(provider["samples"])


def _kernels(graph: Entry | None) -> str:
    if graph is None:
        return ""
    if "failure" in graph:
        return f"not captured: {graph['failure'][:60]}"
    return f"{graph['result']['milliseconds'] * 1e3:.1f}"


def failures_of_fastrl(results: dict[str, Entry]) -> list[str]:
    """Return what failed in fastrl; a graph may be refused, and is told in its table."""
    lines = []
    for job, one in results.items():
        if job == "lengths" and "failure" in one:
            lines.append(f"{job}: {one['failure']}")
        case = one.get("result", {})
        for provider in case.get("providers", ()):
            # variants have kinds of their own
            if provider["provider"].startswith("fastrl ") and provider["failure"]:
                what = f"{case['label']}: {case['work']}"
                lines.append(f"{what}, {provider['provider']}: {provider['failure']}")
    return lines


def targets(results: dict[str, Entry]) -> list[str]:
    """Return the ratios that the project aims at, each of two times of one interleaved run."""
    cases = {
        (one["result"]["work"], one["result"]["shape"], one["result"]["dtype"]): (
            job,
            one["result"],
        )
        for job, one in results.items()
        if job.isdigit() and "result" in one
    }
    lines = ["### Targets", "", "| target | backend | found | |", "| --- | --- | ---: | --- |"]
    for name, key, wanted in _TARGETS:
        if key not in cases:
            lines.append(f"| {name} {wanted} | | not run | |")
            continue
        rows = list(_RATIOS[name](*cases[key], results))
        for backend, found, value in rows:
            met = _met(value, wanted)
            lines.append(
                f"| {name} {wanted} | {backend} | {found} | {'met' if met else 'missed'} |"
            )
        if not rows:
            lines.append(f"| {name} {wanted} | | not measured | |")
    return lines


def _met(value: float, wanted: str) -> bool:
    sign, limit = wanted.split()[:2]
    return value >= float(limit) if sign == ">=" else value <= float(limit)


def _pairs(case: Entry, floor: str, suffix: str = "") -> Iterator[tuple[str, float, float]]:
    """Yield backend, its time, the time of the floor."""
    times = {one["provider"]: median(one) for one in case["providers"] if one["samples"]}
    for backend in ("triton", "cuda", "cpu"):
        ours, against = f"fastrl {backend}{suffix}", floor.format(backend=backend)
        if ours in times and against in times:
            yield backend, times[ours], times[against]


def _of_copy(passes: float):
    def ratios(job: str, case: Entry, results: dict[str, Entry]):
        for backend, ours, copy in _pairs(case, "copy"):  # which reads and writes: two passes
            share = 100 * copy * passes / 2 / ours
            yield backend, f"{share:.1f} %", share

    return ratios


def _times(floor: str, suffix: str = ""):
    def ratios(job: str, case: Entry, results: dict[str, Entry]):
        for backend, ours, against in _pairs(case, floor, suffix):
            yield backend, f"{ours / against:.3f}", ours / against

    return ratios


def _of_kernels(job: str, case: Entry, results: dict[str, Entry]):
    for backend in ("triton", "cuda", "cpu"):
        graph = results.get(f"graph {job} fastrl {backend}", {}).get("result")
        if graph is not None:
            found = graph["milliseconds"] * 1e3
            yield backend, f"{found:.1f} us", found


LINEAR = "loss and gradients, trained head"
_BIG, _FLAT = "8192 x 4096 x 128256", "8192 x 896 x 151936"
_STATS = "log-probability and entropy, % of copy bandwidth, 8192 x 151936 bf16"
_LOSS = "loss and gradient from logits, % of 4NV bytes at copy speed, 8192 x 151936 bf16"
_GEMMS = f"fused linear {_BIG} bf16 / three bare GEMMs"
_NARROW = f"fused linear {_FLAT} bf16 / three bare GEMMs"
_AUTOCAST = f"float32 weights under bf16 autocast / bf16, {_BIG}"
_GAE = "GAE 16 x 131072, us of its kernels"
_TARGETS = [
    (_STATS, ("log-probability and entropy", "8192 x 151936", "bfloat16"), ">= 90"),
    (_LOSS, ("loss and gradient", "8192 x 151936", "bfloat16"), ">= 88"),
    (_GEMMS, (LINEAR, _BIG, "bfloat16"), "<= 1.15"),
    (_NARROW, (LINEAR, _FLAT, "bfloat16"), "<= 1.5"),
    (_AUTOCAST, (LINEAR, _BIG, "bfloat16"), "<= 1.05"),
    (_GAE, ("GAE with a mask", "16 x 131072", "float32"), "<= 20"),
]
_RATIOS = {
    _STATS: _of_copy(1),
    _LOSS: _of_copy(2),
    _GEMMS: _times("bare GEMMs"),
    _NARROW: _times("bare GEMMs"),
    _AUTOCAST: _times("fastrl {backend}", ", float32 weights, autocast"),
    _GAE: _of_kernels,
}
