"""The JSON in bench/results: read, selected from, and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
LINE = 3000  # characters: a case of a benchmark, or a run of a study, is a line


def read(kind: str) -> dict:
    """Results of a kind; of several runs of `fastrl bench`, the cases of all."""
    found: dict = {}
    for path in sorted(RESULTS.glob(f"{kind}*.json")):
        one = json.loads(path.read_text())
        if "cases" in one:
            one["cases"] = found.get("cases", []) + one["cases"]
        found = one
    return found


def matching(results: dict, **wanted: object) -> list[dict]:
    """The cases whose fields, or numbers of their shape, are these."""
    cases = results.get("cases", [])
    return [case for case in cases if wanted.items() <= {**case, **case["shape"]}.items()]


def written(value: Any) -> str:
    """The text of a file: each entry in a line, unless that is long."""
    return broken(value, "") + "\n"


def broken(value: Any, indent: str) -> str:
    line = json.dumps(value)
    if not isinstance(value, dict | list) or (indent and len(line) <= LINE):
        return line
    inner = f"{indent} "
    if isinstance(value, list):
        parts = [broken(one, inner) for one in value]
    else:
        parts = [f"{json.dumps(name)}: {broken(one, inner)}" for name, one in value.items()]
    return line[0] + ",".join(f"\n{inner}{part}" for part in parts) + f"\n{indent}{line[-1]}"
