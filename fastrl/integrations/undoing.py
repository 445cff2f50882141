"""The handle that `use_fastrl` returns: what it changed can be undone."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

Handle = TypeVar("Handle", bound="Undoable")


class Undoable:
    """A change with an `undo()`, which as a context manager undoes itself."""

    def undo(self) -> None:
        """Undo the change; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self: Handle) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()
