"""The machine and versions that numbers were measured with, and what the machine can do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

import fastrl
from fastrl.bench.conditions import COPY, Conditions
from fastrl.bench.peers import PEERS, is_installed

CEILINGS = "ceilings"  # what the machine can do, and the job that measures it


def machine(device: torch.device) -> dict[str, str]:
    """Return the device, its clocks, and the versions of all software that takes part."""
    found = {
        "device": _gpu() if device.type == "cuda" else _cpu(),
        "system": platform.platform(),
        "fastrl": fastrl.__version__,
        "commit": _commit(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    versions = {name: version(name) for name in ("triton", *(pip for _, _, pip in PEERS.values()))}
    found |= {name: one for name, one in versions.items() if one}
    missing = [pip for name, (*_, pip) in PEERS.items() if not is_installed(name)]
    return found | {"not installed": ", ".join(missing)}


def version(distribution: str) -> str:
    """Return the version of a distribution; '' where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    model, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model}, {torch.get_num_threads()} threads of {os.cpu_count()}, {capability}"


def _gpu() -> str:
    query = "name,clocks.sm,clocks.mem,power.draw,power.limit,driver_version"
    # asking torch for its device would open it in this process
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={first}"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return said.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return torch.cuda.get_device_name()


def _commit() -> str:
    """Return the commit of a checkout that fastrl is imported from; '' for an installed one."""
    root = Path(fastrl.__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # there is no git
        return ""


def ceilings(device: torch.device, *, tiny: bool) -> dict[str, float]:
    """Measure a copy and GEMMs, which bound what any provider can reach."""
    large = device.type == "cuda"
    elements = 2**10 if tiny else 2**29
    side = 64 if tiny else 8192 if large else 2048
    if large or tiny:
        source = torch.randn(elements, device=device)
        target = torch.empty_like(source)
        seconds = _median(partial(target.copy_, source))
        found = {COPY: 2 * source.nbytes / seconds / 1e9}
        del source, target
    else:
        found = {COPY: Conditions.ceiling()}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        seconds = _median(partial(torch.mm, a, b))
        name = str(dtype).removeprefix("torch.")
        found[f"{name} GEMM TFLOP/s"] = 2 * side**3 / seconds / 1e12
    if device.type == "cuda":
        chip = torch.cuda.get_device_properties(device)
        found["multiprocessors"] = chip.multi_processor_count
        found["cache MB"] = chip.L2_cache_size / 1e6
    return found


def _median(call: Callable[[], object]) -> float:
    threads = torch.get_num_threads()
    timer = Timer("call()", globals={"call": call}, num_threads=threads)
    least = 7 * timer.timeit(2).median  # the first two are for warming up
    return timer.blocked_autorange(min_run_time=max(0.2, least)).median
