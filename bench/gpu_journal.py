"""What a run of bench/gpu.py has found so far: a JSON line each, on disk as soon as it is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME = "bench.jsonl"


class Journal:
    """The lines of a run.

    A job is `anchors`, `lengths`, the number of a case, or `graph <number> <provider>`.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def append(self, **entry: Any) -> None:
        with self.path.open("a") as file:
            file.write("\n" * is_cut(self.path) + json.dumps(entry) + "\n")

    def entries(self) -> list[dict[str, Any]]:
        """Return all whole lines."""
        return whole_lines(self.path)

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the result of every job that ended, by job."""
        return {one["job"]: one for one in self.entries() if "result" in one or "failure" in one}

    def unfinished(self, since: int = 0) -> list[str]:
        """Return the jobs that started, after so many entries, and did not end."""
        ended = self.results()
        started = [one["job"] for one in self.entries()[since:] if "started" in one]
        return [job for job in dict.fromkeys(started) if job not in ended]

    def tried(self, job: str) -> str:
        """Return the provider of a job that was called last, or ''."""
        names = [
            one["trying"] for one in self.entries() if one.get("job") == job and "trying" in one
        ]
        return names[-1] if names else ""

    def left_out(self, job: str) -> dict[str, str]:
        """Return the providers of a job that ended its process, and why."""
        found = (one for one in self.entries() if one.get("job") == job and "lost" in one)
        return {one["lost"]: one["why"] for one in found}


def whole_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    # a process may have been killed in the middle of a line, and another have gone on
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def is_cut(path: Path) -> bool:
    """Return whether the last line is not whole."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read(1) not in (b"", b"\n")
