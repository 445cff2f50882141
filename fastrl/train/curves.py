"""``curves.png``: the metrics of a run over its steps."""

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_PANELS = (
    ("reward", ("reward", "held_out_reward")),
    ("KL", ("kl", "kl_old")),
    ("entropy", ("entropy",)),
    ("completion length", ("length",)),
    ("clip fraction", ("clip_fraction",)),
    ("value", ("explained_variance", "value_loss")),
)
_LABELS = {
    "reward": "train prompts, sampled",
    "held_out_reward": "held-out prompts, greedy",
    "kl": "to the reference",
    "kl_old": "to the sampling policy",
    "explained_variance": "explained variance",
    "value_loss": "loss",
}


def draw(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Plot the quantities in ``rows`` against the step, one panel each.

    Raises:
        OSError: The file could not be written; a previous one is unchanged.
    """
    known = {key for row in rows for key in row}
    panels = [(title, kept) for title, keys in _PANELS if (kept := [k for k in keys if k in known])]
    figure = Figure(figsize=(4.2 * max(1, (len(panels) + 1) // 2), 6), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, keys) in enumerate(panels, 1):
        axes = figure.add_subplot(2, (len(panels) + 1) // 2, place)
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if key in row]
            axes.plot(
                *zip(*points, strict=True), label=_LABELS.get(key, key), marker="o", markersize=2
            )
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if len(keys) > 1 or title == "KL":
            axes.legend(fontsize="small")
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, dpi=110, format="png")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
