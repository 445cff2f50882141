"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import signal
from types import FrameType, TracebackType
from typing import Any

from fastrl.train.distributed import ranks


class Interrupt:
    """A context manager in which the first SIGINT or SIGTERM only sets ``requested``.

    A second one has its usual effect, unless there are several ranks. Outside the main thread,
    where Python allows no signal handlers, this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        """Install the handlers."""
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
        """Restore the previous handlers."""
        self._restore()

    def on_any_rank(self) -> bool:
        """Whether it is requested on any rank; then on all. All ranks must call this together."""
        self.requested = ranks.any_rank(self.requested)
        return self.requested

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if ranks.count() == 1:  # torchrun passes a signal on that the terminal has sent already
            self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
