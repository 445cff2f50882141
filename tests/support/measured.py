"""Peak memory of a piece of code, measured in a separate process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastrl import native

needs_measuring = [
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc"),
    pytest.mark.skipif(native.missing is not None, reason=str(native.missing)),
]

PRELUDE = """
import ctypes, json, sys, torch, fastrl
from pathlib import Path

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def reset_peak():
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")

case = json.loads(sys.argv[1])
"""
# Every buffer from 1 MiB up is mapped alone and returned when freed: otherwise malloc raises that
# limit as it runs, and the peak depends on which thread's arena a buffer happens to fall into.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


def measured(code, case):
    """Run the code after the prelude with `case`; return what it prints as JSON."""
    command = [sys.executable, "-c", PRELUDE + code, json.dumps(case)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | MAPPED
    )
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
