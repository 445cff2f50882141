"""A line chart as the numbers that a template writes into an SVG, in its units."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.ticker import MaxNLocator

from fastrl.train.run.curves import Row, height, label

_MOST_POINTS = 600  # per curve, about two per pixel; of more, every k-th
_MOST_MARKS = 60


class Tick(NamedTuple):
    """A tick of an axis: where it is, and its number."""

    at: float
    text: str


class Curve(NamedTuple):
    """A quantity: its points ``x,y x,y ...``, marked if they are few, and its last value."""

    label: str
    path: str
    marks: list[tuple[float, float]]
    last: str


class Chart(NamedTuple):
    """Quantities over the step."""

    title: str
    curves: list[Curve]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    width: int = 320
    height: int = 180
    left: int = 44
    right: int = 312
    top: int = 8
    bottom: int = 160


def chart(title: str, keys: Sequence[str], rows: Sequence[Row]) -> Chart:
    """Draw ``keys`` of ``rows`` against the step, without values that have no `height`."""
    of_key = {key: [(row["step"], height(row, key)) for row in rows] for key in keys}
    points = {key: [one for one in some if not math.isnan(one[1])] for key, some in of_key.items()}
    every = [point for some in points.values() for point in some]
    if not every:
        return Chart(title, [], [], [])
    frame = Chart._field_defaults
    across = _Axis([x for x, _ in every], frame["left"], frame["right"])
    up = _Axis([y for _, y in every], frame["bottom"], frame["top"])
    curves = []
    for key, some in points.items():
        if not some:
            continue
        thinned = some[:: -(-len(some) // _MOST_POINTS)]
        placed = [(across.place(x), up.place(y)) for x, y in (*thinned, some[-1])]
        path = " ".join(f"{x},{y}" for x, y in placed)
        marks = placed[:-1] if len(some) <= _MOST_MARKS else []
        curves.append(Curve(label(key), path, marks, f"{some[-1][1]:.4g}"))
    return Chart(title, curves, across.ticks(integer=True), up.ticks(integer=False))


class _Axis:
    """Values from the least to the greatest, laid out from ``begin`` to ``end``."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        self._low, self._high = min(values), max(values)
        if self._low == self._high:
            margin = abs(self._low) / 2 or 1.0
            self._low, self._high = self._low - margin, self._high + margin
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(self._begin + share * (self._end - self._begin), 1)

    def ticks(self, *, integer: bool) -> list[Tick]:
        at = MaxNLocator(nbins=5, integer=integer).tick_values(self._low, self._high)
        inside = [float(value) for value in at if self._low <= value <= self._high]
        return [Tick(self.place(value), f"{value:.6g}") for value in inside]
