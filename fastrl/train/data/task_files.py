"""The records of an embedded task as files: what a run keeps, and what a command writes."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

Record = dict[str, str | list[str]]
Split = Callable[[int], tuple[list[Record], list[Record]]]


def write(directory: Path, split: Split, seed: int) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``held_out.jsonl`` into ``directory`` and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = directory / "train.jsonl", directory / "held_out.jsonl"
    for path, records in zip(paths, split(seed), strict=True):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return paths


def main(split: Split, description: str) -> None:
    """Write the two files where the command line says."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0, help="determines the split and the order")
    arguments = parser.parse_args()
    train, held_out = write(arguments.out, split, arguments.seed)
    sys.stdout.write(f"{train}\n{held_out}\n")
