"""Calls of reward functions in processes of their own, with a time limit for each completion."""

import concurrent.futures
import fcntl
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch
from pebble import ProcessExpired, ProcessPool

from fastrl.train.data.prompts import Record
from fastrl.train.rewards.scoring import (
    Failure,
    Outcome,
    RewardError,
    RewardFunction,
    import_reward,
    outcomes,
)

_ATTEMPTS = 3  # for a call whose worker was terminated from outside


class Call(NamedTuple):
    """A completion to be rewarded."""

    function: str  # "module:function"
    prompt: str
    completion: str
    record: Record


class WorkerPool:
    """Processes that reward one completion at a time.

    They start with the first call. One that exceeds the time limit is killed and replaced. They end
    with `close`, and with this process however it ends. They are forked from a server that
    has imported what this package needs, and import the functions themselves.

    Args:
        workers: How many.
        seconds: Time limit of a call; None for none.
        functions: ``"module:function"`` of the functions that are called.
        stop_at_failure: Whether calls after the first failure are not made.
    """

    def __init__(
        self,
        workers: int,
        seconds: float | None,
        functions: Sequence[str],
        *,
        stop_at_failure: bool,
    ) -> None:
        self._workers, self._seconds, self._functions = workers, seconds, list(functions)
        self._stop_at_failure = stop_at_failure
        self._pool: ProcessPool | None = None

    def outcomes(self, calls: Sequence[Call]) -> list[Outcome]:
        """The reward for each call, or why there is none.

        Raises:
            RewardError: The workers cannot start, or are terminated again and again.
        """
        done: dict[int, Outcome] = {}
        for _ in range(_ATTEMPTS):
            pool = self._running()
            waiting = {
                i: pool.schedule(_reward, (call,), timeout=self._seconds)
                for i, call in enumerate(calls)
                if i not in done
            }
            for i, future in waiting.items():
                outcome = self._outcome(future)
                if outcome is not None:
                    done[i] = outcome
                if isinstance(outcome, Failure) and self._stop_at_failure:
                    self.close()
                    return [done.get(i, Failure("was not called")) for i in range(len(calls))]
            if len(done) == len(calls):
                return [done[i] for i in range(len(calls))]
        raise RewardError(
            "could not be called: the worker processes ended. Something terminates them, or the "
            'script that trains does not guard its first lines by if __name__ == "__main__"'
        )

    def close(self) -> None:
        """End the workers, whatever they do."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _outcome(self, future: Any) -> Outcome | None:
        """The outcome of a call; None if its worker was terminated from outside."""
        try:
            reward, reason = future.result()
        except concurrent.futures.TimeoutError:
            return Failure(f"took longer than {self._seconds:g} s")
        except ProcessExpired as error:
            if error.exitcode == -signal.SIGTERM:
                return None
            return Failure(f"ended its worker process, with exit code {error.exitcode}")
        except (BrokenProcessPool, CancelledError):
            return None
        return Failure(reason) if reward is None else reward

    def _running(self) -> ProcessPool:
        """The pool; a new one if all workers of the last one were terminated."""
        if self._pool is not None and not self._pool.active:
            self.close()
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_preloaded())
            self._pool = ProcessPool(
                self._workers, initializer=_start, initargs=(self._functions,), context=context
            )
            _start_without_interrupts(self._pool)
        return self._pool


def _preloaded() -> list[str]:
    """What all workers import: `worker_server`, and the loop if it was started with ``-m``."""
    program = getattr(sys.modules["__main__"], "__spec__", None)
    name = "" if program is None else program.name
    loop = [name] if name.startswith("fastrl.train.") else []
    return ["fastrl.train.rewards.worker_server", *loop]


def _start_without_interrupts(pool: ProcessPool) -> None:
    """Start the pool's processes and threads so that a Ctrl-C reaches none of them.

    They inherit the blocked signal, and so do the processes that replace others.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        assert pool.active  # starts it
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_functions: dict[str, RewardFunction] = {}  # of this worker


def _start(functions: Sequence[str]) -> None:
    """Prepare this worker."""
    _end_with(multiprocessing.parent_process())
    os.setsid()  # signals of the terminal, and to the run's process group, are not for workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends also what never returns to Python
    torch.set_num_threads(1)
    for name in functions:
        _functions[name] = import_reward(name)


def _end_with(run: Any) -> None:
    """Let the system end this process when the run's process ends, whatever this one computes.

    The run holds the other end of the sentinel, a pipe; its closing is a SIGIO here, which ends a
    process also inside of a function that never returns to Python.
    """
    fcntl.fcntl(run.sentinel, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(run.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(run.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if not run.is_alive():  # it ended before
        os._exit(1)


def _reward(call: Call) -> tuple[float | None, str]:
    """The reward, or None and why there is none: numbers and text, which every process can read."""
    try:
        (outcome,) = outcomes(
            _functions[call.function], [call.prompt], [call.completion], [call.record]
        )
    except RewardError as error:
        return None, str(error)
    except BaseException as error:  # such as sys.exit in a user's function
        return None, f"raised {type(error).__name__}: {error}"
    return (None, outcome.reason) if isinstance(outcome, Failure) else (outcome, "")
