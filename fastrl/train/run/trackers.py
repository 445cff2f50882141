"""The metrics of a run in TensorBoard and Weights & Biases, beside ``metrics.jsonl``.

A tracker must never stop a run: one that fails is named once and left out from then on. The log
has every row, so a tracker gets those that it lacks when the run is resumed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from fastrl.train import extras
from fastrl.train.config import LoopConfig
from fastrl.train.run import checkpoint
from fastrl.train.run.weights_and_biases import WeightsAndBiases

Row = dict[str, float]
TENSORBOARD = "tensorboard"


class Tracker(Protocol):
    """Something that shows the rows of a log."""

    def write(self, row: Row) -> None:
        """Add a row; rows come in the order of their steps."""

    def close(self, *, failed: bool) -> None:
        """Write what is missing; ``failed`` if an error ended the run."""


class TensorBoard:
    """Scalars in event files of ``RUN/tensorboard``, under the keys of the log.

    What follows a row that is written again, since the run was resumed, is purged.

    Args:
        directory: The run's.
        rows: The rows of the log, with the first new one; what the event files lack is written.
    """

    def __init__(self, directory: Path, rows: Sequence[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        events = directory / TENSORBOARD
        known = _steps_in(events)
        missing = (int(row["step"]) for row in rows[:-1] if row["step"] not in known)
        begin = next(missing, int(rows[-1]["step"]))  # the last row was just computed
        self._writer = SummaryWriter(str(events), purge_step=begin if known else None)
        for row in rows:
            if row["step"] >= begin:
                self.write(row)

    def write(self, row: Row) -> None:
        """Add a row, at once, since a run that is resumed continues after it."""
        for key, value in row.items():
            if key != "step":
                self._writer.add_scalar(key, value, int(row["step"]))
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Close the event file."""
        self._writer.close()


class Trackers:
    """The trackers that ``config.track`` names; they begin with the first row that is written.

    Args:
        config: The settings of the run.
        directory: Its directory.
        say: Prints a line.

    Raises:
        ValueError: A package is missing.
    """

    def __init__(self, config: LoopConfig, directory: Path, say: Callable[[str], None]) -> None:
        for name in config.track:
            extras.require(name, extra=name, setting=f"track {name}")
        self._config, self._directory, self._say = config, directory, say
        self._open: dict[str, Tracker] = {}
        self._begun = False

    def write(self, rows: Sequence[Row]) -> None:
        """Add the last row of the log; the first time, what a tracker lacks of the others."""
        before = checkpoint.rng_state()
        if self._begun:
            for name, tracker in list(self._open.items()):
                self._guarded(name, tracker.write, rows[-1])
        else:
            self._begun = True
            for name in self._config.track:
                self._guarded(name, self._begin, name, rows)
        checkpoint.set_rng_state(before)

    def close(self, *, failed: bool) -> None:
        """Close them all."""
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.close, failed=failed)
        self._open.clear()

    def _begin(self, name: str, rows: Sequence[Row]) -> None:
        if name == TENSORBOARD:
            self._open[name] = TensorBoard(self._directory, rows)
        else:
            self._open[name] = WeightsAndBiases(self._config, self._directory, rows, self._say)

    def _guarded(self, name: str, action: Callable[..., None], *given: Any, **named: Any) -> None:
        try:
            action(*given, **named)
        except Exception as error:  # a tracker may raise anything
            self._open.pop(name, None)
            self._say(
                f"track {name}: {type(error).__name__}: {error}; the run continues without it, "
                "metrics.jsonl has every row"
            )


def _steps_in(events: Path) -> set[int]:
    """The steps of all scalars in event files that are not purged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not any(events.glob("events.out.tfevents.*")):
        return set()
    stored = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
    return {event.step for tag in stored.Tags()["scalars"] for event in stored.Scalars(tag)}
