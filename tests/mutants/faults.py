"""The committed list of faults: what each replaces, and the tests that are to see it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("faults.diff")


class Fault(NamedTuple):
    path: str
    tests: tuple[str, ...]  # arguments of pytest
    old: str  # occurs once in the file
    new: str

    def applied(self, text):
        """The text of the file with the fault."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.path} must contain {self.old!r} once, got {count} times")
        return text.replace(self.old, self.new)

    def line(self):
        text = (ROOT / self.path).read_text()
        return text[: text.index(self.old)].count("\n") + 1


def faults():
    """Read the list: of each file a line ``@@ path: tests``, then ``-`` and ``+`` lines."""
    result = []
    for block in LIST.read_text().split("\n\n"):
        lines = [line for line in block.strip("\n").splitlines() if not line.startswith("#")]
        if lines and lines[0].startswith("@@ "):
            path, _, tests = lines.pop(0)[3:].partition(": ")
        if lines:
            old, new = (
                "\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+"
            )
            result.append(Fault(path, tuple(shlex.split(tests)), old, new))
    return result
