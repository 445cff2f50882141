"""Processes that a run starts, which import what this process imports, and what they say."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fastrl import command_start

_SPAWN = multiprocessing.get_context("spawn")
Entry = dict[str, Any]


class Process:
    """A process that calls ``function``; what it prints goes to the file ``log``.

    At the end of a ``with`` block it is killed, and with it what it has started.
    """

    def __init__(self, function: Callable[[], Any], log: Path, **environment: str) -> None:
        log.write_text("")
        self._log = log
        self._said, say_to = _SPAWN.Pipe(duplex=False)
        self._process = _SPAWN.Process(target=_call, args=(function, say_to, log))
        before = dict(os.environ)
        os.environ.update({**environment, **before})
        masked = hasattr(signal, "pthread_sigmask")
        if masked:  # Ctrl-C is for this process, which ends the other
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            for name in environment.keys() - before.keys():
                del os.environ[name]
            if masked:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        say_to.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (AttributeError, ProcessLookupError):  # Windows, or it leads no session yet
                self._process.kill()
        self._process.join()

    def heard(self, deadline: float | None = None) -> Entry | None:
        """Return what it says next; None if it has ended.

        Raises:
            TimeoutError: It has said nothing until ``deadline``, of the monotonic clock.
        """
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._said.poll(left):
            raise TimeoutError
        try:
            return self._said.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):  # it may be killed within a word
            return None

    @property
    def status(self) -> int:
        """Its exit status, for which this waits."""
        self._process.join()
        return self._process.exitcode or 0

    def last_line(self) -> str:
        """Return what it has printed last; '' if that is nothing."""
        return (self._log.read_text(errors="replace").strip().splitlines() or [""])[-1]


_parent: Connection | None = None


def say(**entry: Any) -> None:
    """Tell the parent process, if this is one that a run has started."""
    if _parent is not None:
        _parent.send(entry)


def _call(function: Callable[[], Any], parent: Connection, log: Path) -> None:
    global _parent
    if hasattr(os, "setsid"):
        os.setsid()
    command_start.done()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _parent = parent
    function()
