"""NVIDIA's compute-sanitizer on the calls of workloads.py: `make gpu-sanitize`.

    python -m tests.gpu.sanitize --out build/gpu --seconds 450

One process per tool and backend. OUT/sanitize-<tool>-<backend>.calls has the number of its calls
and a line when one starts and ends, what the tool says is in the .log next to it, and
OUT/sanitize.jsonl has a line for each process that ended. A process does not start another call
when its share of the time is over. A run is clean only if it made all of its calls.

A finding is not yet a defect of a kernel: racecheck may not model bulk copies with barriers in
remote shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND, UNFINISHED = 9, 10  # exit status: of the tool, of calls that were left out
GRACE = 60  # seconds that a single call may last beyond the share


def main() -> int:
    options = _options()
    if options.calls:
        return _calls(options.calls, time.monotonic() + options.seconds)
    runs = [(name, backend) for backend in options.backends for name in options.tools]
    if not runs:
        print(
            "make gpu-sanitize has nothing to do: it needs one of TOOLS, and a backend with kernels"
        )
        return 1
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("make gpu-sanitize needs compute-sanitizer, which is not in PATH; it comes with CUDA")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sanitize.jsonl").unlink(missing_ok=True)
    deadline = time.monotonic() + options.seconds
    clean = True
    for i, (name, backend) in enumerate(runs):
        share = (deadline - time.monotonic()) / (len(runs) - i)
        entry = {"tool": name, "backend": backend, **_run(tool, name, backend, share, options.out)}
        print(f"{name}, {backend}: {entry['outcome']} ({entry['seconds']:.0f} s)", flush=True)
        with (options.out / "sanitize.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        clean &= entry["outcome"].startswith("clean")
    return 0 if clean else 1


def _folder(name: str) -> Path:
    return Path(name).resolve()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=_folder, default="build/gpu")
    parser.add_argument("--seconds", type=float, default=450.0, help="limit of the whole run")
    parser.add_argument("--tools", type=_names, default=TOOLS)
    parser.add_argument("--backends", type=_names, default=("cuda", "triton"))
    parser.add_argument("--calls", help="make the calls with this backend, here")
    options = parser.parse_args()
    options.backends = [
        name for name in options.backends or ("cuda", "triton") if name != "reference"
    ]
    return options


def _names(text: str) -> list[str]:
    return re.findall(r"[^\s,]+", text)


def _run(tool: str, name: str, backend: str, seconds: float, out: Path) -> dict[str, object]:
    """Make the calls under a tool and say how it ended."""
    stem = out / f"sanitize-{name}-{backend}"
    log, calls = stem.with_suffix(".log"), stem.with_suffix(".calls")
    command = [tool, "--tool", name, "--error-exitcode", str(FOUND), "--log-file", str(log)]
    command += _only_our_kernels(tool) if backend == "cuda" else []
    if name == "memcheck":  # torch probes the driver with calls that may fail
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "-m", "tests.gpu.sanitize", "--calls", backend]
    command += [f"--seconds={max(0.0, seconds)}"]
    # every tensor in an allocation of its own, so that memcheck sees where it ends
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    with calls.open("w") as file:
        try:
            code: int | str = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False,
                timeout=seconds + GRACE,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = "hung"
    made, announced = _made(calls.read_text(errors="replace"))
    said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    outcome = {
        0: f"clean, {made} calls",
        FOUND: f"FOUND something: {said[-1:]}, see {log}",
        UNFINISHED: f"out of time after {made} calls, nothing found until then",
        "hung": f"HUNG after {made} calls, see {calls}",
    }.get(code, f"FAILED with status {code}, see {calls}")
    if code == 0 and made != announced:
        outcome = f"FAILED: status 0 after {made} of {announced or '?'} calls, see {calls}"
    if code == UNFINISHED and any(re.search(r"SUMMARY: [1-9]", line) for line in said):
        outcome = f"FOUND something: {said[-1:]}, see {log}"
    return {"outcome": outcome, "calls": made, "seconds": time.monotonic() - start}


def _made(said: str) -> tuple[int, int | None]:
    """Return how many calls a process made, and how many it announced."""
    announced = re.search(r"^(\d+) calls$", said, re.MULTILINE)
    made = len(re.findall(r"^made ", said, re.MULTILINE))
    return made, int(announced[1]) if announced else None


def _only_our_kernels(tool: str) -> list[str]:
    """Return the option that leaves torch's kernels alone; its name depends on the version."""
    text = subprocess.run([tool, "--help"], capture_output=True, text=True, check=False).stdout
    known = [name for name in ("--kernel-name", "--kernel-regex") if name in text]
    return [known[0], "kns=fastrl"] if known else []


def _calls(backend: str, deadline: float) -> int:
    import torch

    from tests.gpu.workloads import sanitized

    device = "cpu" if backend == "cpu" else "cuda"
    works = sanitized()
    print(f"{len(works)} calls", flush=True)
    for work in works:
        if time.monotonic() > deadline:
            return UNFINISHED
        print(f"call {work.name}", flush=True)
        work.run({name: x.to(device) for name, x in work.inputs.items()}, backend)
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"made {work.name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
