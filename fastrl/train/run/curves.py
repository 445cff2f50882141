"""The metrics of a run over its steps: ``curves.png``, and what belongs in one panel."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastrl.train.run.terminal import printable

_PHASES = ("generate", "score", "logprobs", "learn", "evaluate")
_PANELS = (
    ("reward", ("reward", "held_out_reward")),
    ("reward deviation", ("reward_std",)),
    ("reward parts", ()),  # the keys that begin with PART or HELD_OUT_PART
    ("accuracy on pairs", ("accuracy", "held_out_accuracy")),
    ("loss on pairs", ("loss", "held_out_loss")),
    ("reward of completions", ("reward_chosen", "reward_rejected")),
    ("KL", ("kl", "kl_old", "kl_sampler")),
    ("entropy", ("entropy",)),
    ("completion length", ("length",)),
    ("clip fraction", ("clip_fraction",)),
    ("value", ("explained_variance", "value_loss")),
    ("learning rate", ("learning_rate",)),
    ("seconds per phase", tuple(f"seconds_{phase}" for phase in _PHASES)),
    ("peak memory per phase, GB", tuple(f"peak_gb_{phase}" for phase in _PHASES)),
    ("tokens per second", ("tokens_per_second",)),
    ("tokens in the model", ("real_tokens", "padded_tokens")),
    ("share of completions", ("truncated", "left_out")),
)
PART = "reward/"
HELD_OUT_PART = "held_out_reward/"
_LABELS = {
    "reward": "train prompts, sampled",
    "held_out_reward": "held-out prompts, greedy",
    "accuracy": "train pairs",
    "held_out_accuracy": "held-out pairs",
    "loss": "train pairs",
    "held_out_loss": "held-out pairs",
    "reward_chosen": "chosen",
    "reward_rejected": "rejected",
    "kl": "to the reference",
    "kl_old": "to the sampling policy",
    "kl_sampler": "sampler to trainer",
    "explained_variance": "explained variance",
    "value_loss": "loss",
    "real_tokens": "real",
    "padded_tokens": "with padding",
    "left_out": "left out",
    **{f"{kind}_{phase}": phase for kind in ("seconds", "peak_gb") for phase in _PHASES},
}
_NOT_SHOWN = {"step", "seconds_start", "peak_gb_start"}
_LARGEST = 3e38  # of float32; where numbers are much larger, no axis finds its ticks

Row = Mapping[str, float]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot the quantities in ``rows`` against the step, one panel each.

    Raises:
        OSError: The file could not be written; a previous one is unchanged.
    """
    shown = panels(rows)
    lines = 2 if len(shown) <= 8 else 3
    columns = max(1, -(-len(shown) // lines))
    partial = path.with_name(f".{path.name}.partial")
    with rc_context({"text.parse_math": False}):  # a name with $ is no formula
        figure = Figure(figsize=(4.2 * columns, 3 * lines), layout="constrained")
        FigureCanvasAgg(figure)
        for place, (title, keys) in enumerate(shown, 1):
            _plot(figure.add_subplot(lines, columns, place), title, keys, rows)
        try:
            figure.savefig(partial, dpi=110, format="png")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def further(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """A panel for each quantity that has none in `panels`."""
    shown = {key for _, keys in panels(rows) for key in keys} | _NOT_SHOWN
    known = dict.fromkeys(key for row in rows for key in row)
    return [(printable(key), [key]) for key in known if key not in shown]


def panels(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """The title of each panel that has a quantity, and the keys of its quantities in ``rows``."""
    known = dict.fromkeys(key for row in rows for key in row)
    parts = tuple(key for key in known if key.startswith((PART, HELD_OUT_PART)))
    of_title = [(title, parts if title == "reward parts" else keys) for title, keys in _PANELS]
    return [(title, kept) for title, keys in of_title if (kept := [k for k in keys if k in known])]


def height(row: Row, key: str) -> float:
    """Where a quantity is drawn: NaN, which is nowhere, if it is missing or too large."""
    value = row.get(key, math.nan)
    return value if -_LARGEST <= value <= _LARGEST else math.nan


def label(key: str) -> str:
    """The name of a quantity in the legend of its panel."""
    if key.startswith(HELD_OUT_PART):
        return f"{printable(key.removeprefix(HELD_OUT_PART))}, held out"
    return _LABELS.get(key, printable(key.removeprefix(PART)))


def _plot(axes: Any, title: str, keys: Sequence[str], rows: Sequence[Row]) -> None:
    for key in keys:
        points = [(row["step"], height(row, key)) for row in rows if key in row]
        axes.plot(
            *zip(*points, strict=True),
            label=label(key),
            marker="o",
            markersize=2,
        )
    axes.set(title=title, xlabel="step")
    axes.grid(alpha=0.3)
    if len(keys) > 1 or title in ("KL", "share of completions", "reward parts"):
        axes.legend(axes.lines, [line.get_label() for line in axes.lines], fontsize="small")
