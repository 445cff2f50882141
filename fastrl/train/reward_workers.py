"""Processes that call a reward function and can be killed, each with one completion at a time."""

import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from typing import Any

from fastrl.train import reward_calls
from fastrl.train.reward_calls import Failure, RewardError, Source

_MOST = 8  # processes, each with its own copy of what the function imports

#: Sets the path before anything is imported, so that no file beside the program hides a module.
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; import runpy; "
    "runpy.run_path({file!r}, run_name='__main__')"
)


class Workers:
    """Processes that keep a function loaded between calls; they start when they are needed.

    They are no `multiprocessing` processes, which import the program that was started: a heavy one,
    or a script that would begin to train again.

    Args:
        source: The function, called with lists of one prompt, one completion and one record.
        seconds: Time for a completion. Loading the function does not count.
    """

    def __init__(self, source: Source, seconds: float) -> None:
        self._source = source
        self._seconds = seconds
        self._workers: list[_Worker] = []
        self.late = 0  # completions that got 0 because they took too long
        weakref.finalize(self, _kill, self._workers)

    def call(self, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return for each prompt, completion and record what the function returns, or a `Failure`.

        Raises:
            RewardError: A worker cannot load the function.
        """
        try:
            return self._call(rows)
        except BaseException:  # such as an interrupt, in the middle of what a worker says
            self.close()
            raise

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        _kill(self._workers)

    def _call(self, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        outcomes: list[Any] = [None] * len(rows)
        waiting = deque(range(len(rows)))
        count = min(_MOST, os.cpu_count() or 1, len(rows))
        while waiting or any(worker.row is not None for worker in self._workers):
            while waiting and len(self._workers) < count:
                self._workers.append(_Worker(self._source, self._seconds))
            for worker in list(self._workers):
                if waiting and worker.is_idle:
                    row = waiting.popleft()
                    try:
                        worker.begin(row, rows[row], self._seconds)
                    except OSError:  # it ended while it had nothing to do
                        self._drop(worker)
                        waiting.appendleft(row)
                    except Exception as error:  # a record may hold what cannot be sent
                        outcomes[row] = reward_calls.failure(error)
            used = {worker.pipe: worker for worker in self._workers if not worker.is_idle}
            limits = [worker.deadline - time.monotonic() for worker in used.values()]
            timeout = max(0.0, min(limits, default=0.0))
            spoke = wait(list(used), None if timeout == float("inf") else timeout)
            for pipe, worker in used.items():
                row_of = worker.row
                if pipe in spoke:
                    outcome = worker.answer()
                elif worker.deadline <= time.monotonic():
                    outcome = Failure(
                        f"took longer than {self._seconds:g} s", ended=True, late=True
                    )
                else:
                    continue
                if isinstance(outcome, Failure) and outcome.ended:
                    self._drop(worker)
                if row_of is not None:
                    outcomes[row_of] = outcome
                elif isinstance(outcome, Failure):
                    where = f"{self._source.place}:{self._source.name}"
                    broken: Any = RewardError(
                        f"reward: a worker cannot load {where}, which {outcome.reason}"
                    )
                    broken.__notes__ = [outcome.trace] if outcome.trace else []
                    raise broken
        return outcomes

    def _drop(self, worker: "_Worker") -> None:
        self._workers.remove(worker)
        worker.kill()


class _Worker:
    """A process that loads a function, and then calls it with one row at a time."""

    def __init__(self, source: Source, seconds: float) -> None:
        self.pipe, theirs = Pipe()
        program = _PROGRAM.format(path=sys.path, file=reward_calls.__file__)
        numbers = (theirs.fileno(), os.getpid(), seconds)
        arguments = [sys.executable, "-c", program, *map(str, numbers)]
        # one thread each, and formulas in one order in every run
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        with theirs:
            self._process = subprocess.Popen(
                arguments,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends the run, and the run ends its workers
            )
        self.pipe.send(tuple(source))
        self.row: int | None = None
        self.deadline = float("inf")
        self._loaded = False

    @property
    def is_idle(self) -> bool:
        return self._loaded and self.row is None

    def begin(self, row: int, columns: tuple[Any, ...], seconds: float) -> None:
        """Send a row to the function."""
        self.pipe.send(columns)
        self.row, self.deadline = row, time.monotonic() + seconds

    def answer(self) -> list[Any] | Failure | None:
        """Return what the function returned, or None after it was loaded."""
        try:
            said = self.pipe.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            return Failure(f"ended its process, with exit code {code}", ended=True)
        self.row, self.deadline, self._loaded = None, float("inf"), True
        return Failure(*said) if isinstance(said, tuple) else said

    def kill(self) -> None:
        """End the process, and those that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.pipe.close()


def source_of(path: str) -> Source:
    """Return where a worker finds ``"module:function"``.

    Raises:
        ValueError: It is a function of a program that is no file, such as a notebook.
    """
    module, _, name = path.partition(":")
    if module != "__main__":
        return Source(module, name)
    program = sys.modules[module]
    if program.__spec__ is not None:
        return Source(program.__spec__.name, name)
    if (file := getattr(program, "__file__", None)) is None:
        raise ValueError(f"reward_timeout needs functions of a file or module, got {path!r}")
    return Source(file, name, is_file=True)


def _kill(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()
