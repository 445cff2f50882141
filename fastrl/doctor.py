"""`python -m fastrl` and `fastrl doctor`: what works on this machine, and what is missing.

The report contains no environment variables.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import sys
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

import fastrl
from fastrl.backend import BACKENDS, get_backend, unavailable
from fastrl.native import cpu_capability

_PACKAGE = "fastrl-kernels"
#: Extras for development, which a user does not need.
_OF_DEVELOPMENT = {"bench", "docs", "test", "lint", "release", "dev"}
_REQUIREMENT = re.compile(r"([\w.-]+)\s*([^;]*?)\s*;.*extra\s*==\s*['\"]([\w-]+)['\"]")
_GIB = 2**30


def report() -> str:
    """Return versions, backends, optional packages, GPUs, threads and free disk, as text."""
    return "\n".join([*_backends(), *_packages(), *_machine()])


def main() -> None:
    """Print the report."""
    sys.stdout.write(report() + "\n")


def _backends() -> list[str]:
    lines = [
        f"fastrl {fastrl.__version__}, torch {torch.__version__}, "
        f"python {platform.python_version()}, {platform.machine()}",
        f"default backend: {get_backend()}",
    ]
    for name in BACKENDS[1:]:
        reason = unavailable(name)
        state = "usable" if reason is None else f"not usable: {reason}"
        if name == "cpu" and reason is None:
            state += f" ({cpu_capability()}, {torch.get_num_threads()} threads)"
        lines.append(f"  {name:<10} {state}")
    return lines


def _packages() -> list[str]:
    """Return for each extra its packages with versions, and how to install missing ones."""
    try:
        required = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return [f"optional packages: unknown, since {_PACKAGE} is not installed as a package"]
    extras: dict[str, list[str]] = {}
    missing = set()
    for name, versions, extra in (m.groups() for r in required if (m := _REQUIREMENT.match(r))):
        if extra in _OF_DEVELOPMENT or name == _PACKAGE:
            continue
        state, usable = _state(name, versions)
        extras.setdefault(extra, []).append(f"{name} {state}")
        if not usable:
            missing.add(extra)
    lines, width = ["optional packages, by extra:"], max(map(len, extras), default=0)
    for extra, states in extras.items():
        install = f"; pip install '{_PACKAGE}[{extra}]'" if extra in missing else ""
        lines.append(f"  {extra:<{width}} {', '.join(states)}{install}")
    return lines


def _state(name: str, versions: str) -> tuple[str, bool]:
    """Return a package's version, or what is wrong with it, and whether it can be used."""
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing", False
    least = re.search(r">=\s*([\w.]+)", versions)
    if least and TorchVersion(found) < least[1]:
        return f"{found}, but {least[1]} or later is needed", False
    return found, True


def _machine() -> list[str]:
    lines = [f"GPUs: {torch.cuda.device_count() if torch.cuda.is_available() else 'none'}"]
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        lines.append(f"  cuda:{i:<5} {name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free")
    free_disk = shutil.disk_usage(Path.cwd()).free
    return [
        *lines,
        f"threads of torch: {torch.get_num_threads()}",
        f"free disk here: {free_disk / _GIB:.1f} GiB",
    ]
