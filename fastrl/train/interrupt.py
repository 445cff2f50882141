"""Ctrl-C and SIGTERM as a wish to stop after the step at hand."""

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While entered, the first SIGINT or SIGTERM sets ``requested``.

    A second acts as it would have without this. Outside the main thread, where Python allows no
    handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        """Take over the two signals."""
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        except ValueError:  # not the main thread
            self._previous.clear()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give them back."""
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
