"""How a reward function is called: here, or, where this file is the program, in a worker.

A worker imports only the standard library and the function, not torch.
"""

import asyncio
import copy
import functools
import importlib
import inspect
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple


class RewardError(ValueError):
    """A reward function raised, or returned invalid rewards."""


class Failure(NamedTuple):
    """The reason why a function has no reward for a completion."""

    reason: str  # a phrase that follows the function's name
    trace: str = ""
    ended: bool = False  # whether its process was killed, or ended itself
    late: bool = False  # whether it took too long


class Source(NamedTuple):
    """Where a worker finds a function: in a module, or in a file."""

    place: str  # the module's name, or the path of the file
    name: str
    is_file: bool = False


def call(function: Callable[..., Any], *columns: list[Any]) -> list[Any]:
    """Call a function on copies of prompts, completions and records; await what it returns.

    Raises:
        RewardError: It returns no sequence, or not one value for each completion.
        Exception: Whatever the function raises.
    """
    prompts, texts, records = columns
    returned = function(list(prompts), list(texts), copy.deepcopy(records))
    if inspect.isawaitable(returned):
        returned = _awaited(returned)
    if isinstance(returned, (str, bytes, Mapping)):
        raise RewardError(f"must return a sequence of numbers, got {type(returned).__name__}")
    values = list(returned)
    if len(values) != len(texts):
        raise RewardError(f"must return {len(texts)} numbers, got {len(values)}")
    return values


def failure(error: BaseException) -> Failure:
    """Return what a function raised as the reason why there is no reward."""
    if isinstance(error, RewardError):
        return Failure(str(error))
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" in {frame.filename} line {frame.lineno}" for frame in last)
    trace = "".join(traceback.format_exception(error)).rstrip()
    return Failure(f"raised {type(error).__name__}: {error}{place}", trace)


def _awaited(awaitable: Awaitable[Any]) -> Any:
    """Wait for the result on a loop of a thread of its own: a notebook's thread runs one already.

    It is one loop for all calls, since clients and locks belong to the loop that they began on.
    """

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # which may not end the loop
            return None, error

    waiting = asyncio.run_coroutine_threadsafe(outcome(), _loop())
    try:
        returned, error = waiting.result()
    except BaseException:
        waiting.cancel()
        raise
    if error is not None:
        raise error
    return returned


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _serve(connection: Connection, parent: int, seconds: float) -> None:
    """Load a function, and call it with one completion after another, until the parent ends."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        source = Source(*connection.recv())
        if source.is_file:
            function = runpy.run_path(source.place, run_name="__mp_main__")[source.name]
        else:
            function = getattr(importlib.import_module(source.place), source.name)
    except (Exception, SystemExit) as error:
        connection.send(tuple(failure(error)))
        return
    connection.send(None)
    while True:
        try:
            prompt, text, record = connection.recv()
            # if the parent has been killed, and the function lets no thread run
            signal.setitimer(signal.ITIMER_REAL, seconds + 1)
            found: Any = [_plain(v) for v in call(function, [prompt], [text], [record])]
        except EOFError:
            return
        except (Exception, SystemExit) as error:
            found = tuple(failure(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
        with suppress(BrokenPipeError):  # the parent has ended
            connection.send(found)


def _plain(value: Any) -> float | str | None:
    """Return a value in a form that the parent can read without the function's modules."""
    if value is None or isinstance(value, str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return repr(value)


def _end_with(parent: int) -> None:
    """End this process, and what it started, soon after its parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]))
