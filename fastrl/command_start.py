"""The start of fastrl's own commands, before torch is imported, which takes seconds.

``python -m fastrl.train.grpo`` imports this package, and torch, before any of its own code runs.
Until a command calls `done`, Ctrl-C ends it at once, without a traceback, and other packages print
no warnings. Nothing changes in a program that imports fastrl.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

#: Of the monotonic clock.
BEGIN = time.monotonic()
#: OpenMP's threads spin while they wait for one another. Beside other processes, whose cores they
#: then take, that makes training many times slower; so they sleep after 300 turns, microseconds.
TURNS = {"GOMP_SPINCOUNT": "300"}
LOOPS = ("grpo", "ppo")


@contextmanager
def quiet() -> Iterator[None]:
    """Print no warnings, of packages that are imported meanwhile."""
    shown, disabled = warnings.showwarning, logging.root.manager.disable

    def ignore(*warning: object, **options: object) -> None: ...

    warnings.showwarning = ignore
    logging.disable(max(logging.WARNING, disabled))
    try:
        yield
    finally:
        logging.disable(disabled)
        if warnings.showwarning is ignore:
            warnings.showwarning = shown


def done() -> None:
    """End the start: Ctrl-C raises KeyboardInterrupt, and warnings are shown."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _loading.close()


def words(arguments: list[str], original: list[str]) -> list[str] | None:
    """Return a command as the words after ``fastrl``; None if another program runs.

    Args:
        arguments: ``sys.argv``, while this package is imported.
        original: ``sys.orig_argv``.
    """
    program, *rest = arguments or [""]
    if program == "-m":  # the package is imported to find the module that is run
        package, *names = original[-len(arguments)].removeprefix("-m").split(".")
        return [*names[-1:], *rest] if package == "fastrl" else None
    return rest if os.path.basename(program) in ("fastrl", "fastrl.exe") else None


_loading = ExitStack()
if (_words := words(sys.argv, sys.orig_argv)) is not None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _loading.enter_context(quiet())
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # of torch, where it is needed
    if {*_words[:1]} & {*LOOPS} and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*os.environ}:
        os.environ.update(TURNS)
