"""Files of a run: those that grow by a line of JSON, and those that are replaced as a whole."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def keep_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove the rows after ``step`` and a line that an interruption cut; return the others.

    Raises:
        OSError: The file could not be written; it is unchanged.
    """
    kept = [row for row in read_rows(path) if row["step"] <= step]
    replace_file(path, "".join(json.dumps(row) + "\n" for row in kept))
    return kept


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, if it exists, without a line that an interruption cut."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(_parse, lines) if row is not None]


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows; what is not ASCII is escaped.

    Raises:
        OSError: They could not be written.
    """
    try:
        with path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise OSError(f"{path} could not be written: {error.strerror}") from error


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        OSError: It could not be written; a previous one is unchanged.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise OSError(f"{path} could not be written: {error.strerror}") from error


def _parse(line: str) -> dict[str, Any] | None:
    """A row, or None if an interruption truncated the line."""
    try:
        return json.loads(line)  # type: ignore[no-any-return]
    except json.JSONDecodeError:
        return None
