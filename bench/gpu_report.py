"""The tables of bench/gpu.py, from what a run has found so far."""

from __future__ import annotations

from gpu_predictions import predictions
from gpu_targets import Entry, median, targets


def markdown(entries: list[Entry]) -> str:
    """Return everything that a run has found, as one document."""
    results = {one["job"]: one for one in entries if "result" in one or "failure" in one}
    graphs = {job: one for job, one in results.items() if job.startswith("graph ")}
    lines = head(entries)
    for job, one in results.items():
        if job.isdigit():
            lines += section(job, one, graphs)
    late = {one["job"]: one["not_run"] for one in entries if "not_run" in one}
    lines += [f"- not run, out of time: {what}" for job, what in late.items() if job not in results]
    lines += ["", *predictions(results), "", *targets(results)]
    return "\n".join(lines) + "\n"


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
