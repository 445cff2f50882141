"""The second half of `make gpu`: the benchmark matrix on a GPU, against eager torch and peers.

    python bench/gpu.py --minutes 6     # writes bench/results/<gpu>-<date>.md and .json
    python bench/gpu.py --smoke         # the same code on tiny shapes, on a CPU; writes nothing

The protocol is in README.md. In addition: CUDA events surround each full public call, calls rotate
over three input sets so that none stays in the cache, peak memory is what a call allocates, and
GB/s and TFLOP/s count the minimum of work, the same for all providers. Where launches dominate,
the table also has the time of the kernels alone (replayed from a CUDA graph) and of the host.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpu_cases import SHAPES, items
from gpu_item import Item, backends
from gpu_timing import Measured, Plan, anchors, measure

import fastrl

RESULTS = Path(__file__).parent / "results"
PEERS = ("trl", "liger-kernel", "flash-linear-attention", "torchrl", "quack-kernels")
LENGTHS = 50  # different lengths in a row, including compilation


def main() -> int:
    options = _options()
    device = torch.device("cpu" if options.smoke else "cuda")
    deadline = time.monotonic() + 60 * options.minutes
    shapes = SHAPES["smoke" if options.smoke else "gpu"]
    plan = Plan(1, 2, 2, 0.1) if options.smoke else Plan()
    report = {"machine": machine(device), "command": f"python {' '.join(sys.argv)}"}
    elements = 2**10 if options.smoke else 2**30
    gemms = [(8, 16, 8)] if options.smoke else [(8192, 128256, 4096), (8192, 151936, 896)]
    report["anchors"] = anchors(device, elements=elements, gemms=gemms)
    report["lengths"] = different_lengths(device, 3 if options.smoke else LENGTHS)
    lines = _head(report)
    print("\n".join(lines), flush=True)
    report["cases"] = []
    for item in items(shapes, device):
        case = item.make()
        if options.only not in f"{case.label} {case.work}":
            continue
        if time.monotonic() > deadline:
            section = [f"- not run, out of time: {case.label}, {case.work}"]
        else:
            found = measure(case, device, plan, small=item.small)
            section = _table(item, case, found, report["anchors"]["copy TB/s"])
            report["cases"].append(_record(item, case, found))
            del found
        print("\n".join(section), flush=True)
        lines += section
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not options.smoke:
        _save(report, lines)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="no case starts after these")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; --smoke runs the same code on the CPU")
    return options


def machine(device: torch.device) -> dict[str, str]:
    """Versions, GPU and clocks that the numbers were measured with."""
    found = {
        "date": str(datetime.date.today()),
        "torch": torch.__version__,
        "fastrl backends": ", ".join(backends(device)),
    }
    known = {
        one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()
    }
    found |= {name: known.get(name, "not installed") for name in ("triton", *PEERS)}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        query = "clocks.sm,clocks.mem,power.draw,power.limit,driver_version"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found[query] = said.strip()
        except (OSError, subprocess.CalledProcessError) as failure:
            found[query] = f"unknown: {failure}"
    return found


def different_lengths(device: torch.device, count: int) -> dict[str, float]:
    """Seconds for calls that all differ in length: the first time with compilation, then again."""
    backend = backends(device)[0]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 4096, (count,), generator=generator).tolist()

    def once(T: int) -> None:
        logprobs = torch.randn(8, T, device=device) - 2
        mask = torch.ones_like(logprobs)
        fastrl.policy_loss(logprobs, mask[:, 0], mask, old_logprobs=logprobs, backend=backend)
        fastrl.gae(logprobs, mask, mask, backend=backend)
        logits = torch.randn(1, T, 1000, device=device)
        ids = torch.zeros(1, T, dtype=torch.int64, device=device)
        fastrl.token_stats(logits, ids, backend=backend)

    found = {}
    for what in ("first time", "second time"):
        start = time.perf_counter()
        for T in lengths:
            once(T)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found[f"{count} lengths, {what}, s"] = time.perf_counter() - start
    return found


def _head(report: dict) -> list[str]:
    parts = [*report["machine"].items(), ("command", f"`{report['command']}`")]
    parts += [
        (name, f"{value:.3g}")
        for name, value in (*report["anchors"].items(), *report["lengths"].items())
    ]
    return [*(f"- {name}: {value}" for name, value in parts), ""]


def _table(item: Item, case, found: list[Measured], copy: float) -> list[str]:
    rate = "TFLOP/s" if item.flops else "GB/s"
    lines = [f"### {case.label}: {case.work}", ""]
    columns = ["provider", "ms (20-80 %)", rate, "of copy", "peak MiB", "error", "time / fastrl"]
    columns += ["kernels us", "host us"] if item.small else []
    lines += [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    ours = next((one for one in found if one.kind.startswith("fastrl") and one.samples), None)
    for one in found:
        if not one.samples:
            lines.append(f"| {one.provider} | not run: {one.failure} |" + " |" * (len(columns) - 2))
            continue
        low, high = one.quantiles()
        work = item.flops / 1e9 if item.flops else case.bytes_moved / 1e6
        share = "" if item.flops else f"{work / one.median / copy / 1e3:.0%}"
        cells = [
            one.provider,
            f"{one.median:.4g} ({low:.4g}-{high:.4g})",
            f"{work / one.median:.0f}",
            share,
            f"{one.peak / 2**20:.1f}",
            "" if math.isnan(one.error) else f"{one.error:.1e}",
            f"{one.median / ours.median:.2f}" if ours else "",
        ]
        if item.small:
            cells += ["" if t is None else f"{t * 1e3:.1f}" for t in (one.device, one.host)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _record(item: Item, case, found: list[Measured]) -> dict:
    kept = {name: getattr(case, name) for name in ("op", "work", "shape", "bytes_moved")}
    kept |= {"dtype": str(case.dtype), "flops": item.flops}
    return {**kept, "providers": [one._asdict() for one in found]}


def _save(report: dict, lines: list[str]) -> None:
    RESULTS.mkdir(exist_ok=True)
    gpu = re.sub(r"\W+", "-", report["machine"]["gpu"]).strip("-").lower()
    stem = RESULTS / f"{gpu}-{report['machine']['date']}"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {stem.with_suffix('.md')} and .json")


if __name__ == "__main__":
    sys.exit(main())
