"""Processes that a run starts: they import what this process imports, and say what they find."""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import fastrl

#: The folder of the package that is measured.
PACKAGE = str(Path(fastrl.__file__).resolve().parent)
#: Python puts the current folder before all others; another fastrl may be there.
_CODE = """\
import sys
sys.path[:] = {path!r}
from fastrl.bench.child import main
main({package!r})"""
Entry = dict[str, Any]


class Process:
    """A process that calls ``function``; what it prints goes to ``log``, and not to `heard`.

    At the end of a ``with`` block it is killed, and with it what it has started.
    """

    def __init__(self, function: Callable[[], Any], log: IO[str], **environment: str) -> None:
        self._log = log
        code = _CODE.format(path=sys.path, package=PACKAGE)
        with tempfile.TemporaryFile() as file:
            pickle.dump(function, file)
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment, **os.environ},
                start_new_session=True,
            )
        self._said: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:  # Windows
                self._process.kill()
        self._process.wait()

    def heard(self, deadline: float | None = None) -> Entry | None:
        """Return what it says next; None if it has ended.

        Raises:
            TimeoutError: It has said nothing until ``deadline``, of the monotonic clock.
        """
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._said.get(timeout=left)
        except queue.Empty:
            raise TimeoutError from None

    @property
    def status(self) -> int:
        """Its exit status, for which this waits."""
        return self._process.wait()

    def last_line(self) -> str:
        """Return what it has printed last; '' if that is nothing."""
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or [""])[-1]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"') and line.endswith("}\n"):  # it may be killed within one
                self._said.put(json.loads(line))
        self._said.put(None)


_out: IO[str] | None = None


def say(**entry: Any) -> None:
    """Tell the parent process."""
    print(json.dumps(entry), file=_out, flush=True)


def main(package: str) -> None:
    """Call the function that the parent, whose package is given, has written to the input."""
    global _out
    if package != PACKAGE:
        sys.exit(f"the run is one of {package}, and this process has imported {PACKAGE}")
    _out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pickle.load(sys.stdin.buffer)()
