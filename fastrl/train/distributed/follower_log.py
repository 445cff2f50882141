"""The log of a run: its files on the first rank, nothing on the others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fastrl.train.config import LoopConfig
from fastrl.train.distributed import ranks
from fastrl.train.run.run_log import Row, RunLog
from fastrl.train.run.samples import Samples


def open_log(config: LoopConfig, loop: str) -> RunLog:
    """The log of the run; the first rank chooses and locks its directory for all.

    Raises:
        ValueError: As `RunLog`, on all ranks.
    """
    opened: list[RunLog] = []

    def open_first() -> Path:
        opened.append(RunLog(config, loop))
        return opened[0].directory

    directory = ranks.from_first(open_first)
    return opened[0] if opened else FollowerLog(config, directory)


class FollowerLog(RunLog):
    """The log of a rank that writes nothing: it only knows the directory and the rows.

    Args:
        config: The settings of the run.
        directory: What the first rank chose.
    """

    def __init__(self, config: LoopConfig, directory: Path) -> None:
        self.config, self.directory = config, directory
        self.checkpoints = directory / "checkpoints"
        self.rows: list[Row] = []
        self.written: list[Path] = []
        self.samples = Samples(replace(config, sample_every=0), directory, self.say)

    def write(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(row)

    @contextmanager
    def stage(self, name: str, steps: int) -> Iterator[Callable[[int, Row], None]]:
        """Show nothing."""
        yield lambda done, row: None

    def begin(self, step: int) -> None: ...  # noqa: D102
    def follow(self, step: int) -> None: ...  # noqa: D102
    def report(self) -> None: ...  # noqa: D102
    def say(self, line: str) -> None: ...  # noqa: D102
    def finish(self, *, failed: bool = False) -> None: ...  # noqa: D102
    def discard(self) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102
