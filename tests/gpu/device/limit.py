"""A command and its limit of time; needs no package, as `make gpu` lists the pieces without any."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
GRACE = 2.0  # seconds between asking a process to end and ending it


def within(seconds: float, command: list[str] | str, **options: object) -> int | None:
    """Run a command and return its status; None if it had to be ended."""
    running = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options)
    try:
        return running.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGTERM)  # a run of tests then ends what it started
            time.sleep(GRACE)
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
