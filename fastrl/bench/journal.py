"""What a run has found so far: a JSON line each, on disk as soon as it is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME = "journal.jsonl"
CEILINGS = "ceilings"  # the job that measures what the machine can do
Entry = dict[str, Any]


class Journal:
    """The lines of a run; a job is the name of a case, or ``ceilings``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def append(self, **entry: Any) -> None:
        """Add a line."""
        with self.path.open("a") as file:
            file.write("\n" * self._is_cut() + json.dumps(entry) + "\n")

    def size(self) -> int:
        """Return its bytes: to read all lines often would disturb what is measured."""
        return self.path.stat().st_size if self.path.exists() else 0

    def entries(self) -> list[Entry]:
        """Return all whole lines; a process may have been killed in the middle of one."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def results(self) -> dict[str, Entry]:
        """Return what every job that ended has found, by job."""
        return {one["job"]: one for one in self.entries() if "result" in one or "failure" in one}

    def partial(self) -> dict[str, Entry]:
        """Return what is known of the cases that have timed some of their providers, by job."""
        return {one["job"]: one for one in self.entries() if "partial" in one}

    def unfinished(self, since: int = 0) -> list[str]:
        """Return the jobs that started, after so many entries, and did not end."""
        ended = self.results()
        started = [one["job"] for one in self.entries()[since:] if "started" in one]
        return [job for job in dict.fromkeys(started) if job not in ended]

    def tried(self, job: str) -> str:
        """Return the provider of a job that was called last, or ''."""
        found = [
            one["trying"] for one in self.entries() if one.get("job") == job and "trying" in one
        ]
        return found[-1] if found else ""

    def left_out(self, job: str) -> dict[str, str]:
        """Return the providers of a job that ended its process, and why."""
        found = (one for one in self.entries() if one.get("job") == job and "lost" in one)
        return {one["lost"]: one["why"] for one in found}

    def _is_cut(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - 1))
            return file.read(1) not in (b"", b"\n")
