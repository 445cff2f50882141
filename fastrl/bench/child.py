"""Processes that a run starts: they import what this process imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import fastrl

#: The folder of the package that is measured.
PACKAGE = str(Path(fastrl.__file__).resolve().parent)
#: Python puts the current folder before all others for ``-m``; another fastrl may be there.
_CODE = """\
import runpy, sys
sys.path[:] = {path!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)"""


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this fastrl."""
    return [sys.executable, "-c", _CODE.format(path=sys.path, module=module), *arguments]


def check_package(package: str) -> None:
    """End this process if it has imported another fastrl than its parent, which is ``package``."""
    if package != PACKAGE:
        sys.exit(f"the run is one of {package}, and this process has imported {PACKAGE}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and what it has started."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows
            process.kill()
    process.wait()
