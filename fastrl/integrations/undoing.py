"""The handle of `use_fastrl`, which can undo its change."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

Handle = TypeVar("Handle", bound="Undoable")


class Undoable:
    """A change with an `undo()`; as a context manager it undoes itself at the end."""

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
