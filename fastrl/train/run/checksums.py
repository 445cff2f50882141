"""SHA-256 sums of the files in a directory, so that damaged weights are never loaded."""

import hashlib
import json
from pathlib import Path

CHECKSUMS = "checksums.json"
_PIECE = 1 << 20  # bytes read at once


def write(directory: Path) -> None:
    """Write ``checksums.json``: the sum of every other file below ``directory``, by its path."""
    sums = {
        path.relative_to(directory).as_posix(): _sum(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / CHECKSUMS
    }
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")


def verify(directory: Path) -> bool:
    """Compare the files with their sums.

    Returns:
        Whether there are sums. Checkpoints of earlier versions have none.

    Raises:
        ValueError: A file is damaged or missing.
        OSError: A file cannot be read.
    """
    recorded = directory / CHECKSUMS
    if not recorded.exists():
        return False
    sums = json.loads(recorded.read_text())
    if not isinstance(sums, dict):
        raise ValueError(f"{CHECKSUMS} must hold an object")  # noqa: TRY004
    for name, expected in sums.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if _sum(path) != expected:
            raise ValueError(f"{name} is damaged: its checksum is not the one in {CHECKSUMS}")
    return True


def _sum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
