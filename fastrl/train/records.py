"""The stream of a run's records: rows of numbers per step, and samples, as JSON Lines on disk.

A record is a JSON object with its ``"step"``. Curves, report and trackers read nothing else.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastrl.train.checkpoint import replace_file

Row = dict[str, float]


class Records:
    """The records of one file, which are in ``rows`` since `keep` or the first `add`."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path, self._say = path, say

    def read(self) -> list[dict[str, Any]]:
        """Return what is in the file, if it exists, without a line that an interruption cut."""
        text = self._path.read_text(errors="replace") if self._path.exists() else ""
        rows = []
        for number, line in enumerate(text.split("\n")[:-1], 1):
            if (row := _row(line)) is None:
                self._say(f"{self._path} line {number} is damaged; the run continues without it")
            else:
                rows.append(row)
        return rows

    def keep(self, step: int) -> None:
        """Continue the file without the records after ``step``."""
        self.rows = [row for row in self.read() if row["step"] <= step]
        if self._path.exists():
            self._rewrite()

    def add(self, *rows: dict[str, Any]) -> None:
        """Append records.

        Raises:
            OSError: The file cannot be written.
        """
        self.rows += rows
        try:
            with self._path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            raise OSError(f"{self._path.name} could not be written: {error.strerror}") from error

    def replace_last(self, row: dict[str, Any]) -> None:
        """Replace the last record."""
        self.rows[-1] = row
        self._rewrite()

    def _rewrite(self) -> None:
        replace_file(self._path, "".join(json.dumps(row) + "\n" for row in self.rows))


def _row(line: str) -> dict[str, Any] | None:
    """Return the record in a line, or None if it is damaged."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    numbers = isinstance(row, dict) and isinstance(row.get("held_out_reward", 0.0), (int, float))
    return row if numbers and isinstance(row.get("step"), int) else None
