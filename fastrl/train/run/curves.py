"""``curves.png``: the metrics of a run over its steps."""

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_PHASES = ("generate", "score", "logprobs", "learn")
_PANELS = (
    ("reward", ("reward", "held_out_reward")),
    ("accuracy on pairs", ("accuracy", "held_out_accuracy")),
    ("loss on pairs", ("loss", "held_out_loss")),
    ("reward of completions", ("reward_chosen", "reward_rejected")),
    ("KL", ("kl", "kl_old", "kl_sampler")),
    ("entropy", ("entropy",)),
    ("completion length", ("length",)),
    ("clip fraction", ("clip_fraction",)),
    ("value", ("explained_variance", "value_loss")),
    ("seconds per phase", tuple(f"seconds_{phase}" for phase in _PHASES)),
    ("peak memory per phase, GB", tuple(f"peak_gb_{phase}" for phase in _PHASES)),
    ("tokens per second", ("tokens_per_second",)),
    ("tokens in the model", ("real_tokens", "padded_tokens")),
    ("share of completions", ("truncated", "left_out")),
)
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


def draw(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Plot the quantities in ``rows`` against the step, one panel each.

    Raises:
        OSError: The file could not be written; a previous one is unchanged.
    """
    known = {key for row in rows for key in row}
    panels = [(title, kept) for title, keys in _PANELS if (kept := [k for k in keys if k in known])]
    lines = 2 if len(panels) <= 8 else 3
    columns = max(1, -(-len(panels) // lines))
    figure = Figure(figsize=(4.2 * columns, 3 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, keys) in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, place)
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if key in row]
            axes.plot(
                *zip(*points, strict=True), label=_LABELS.get(key, key), marker="o", markersize=2
            )
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if len(keys) > 1 or title in ("KL", "share of completions"):
            axes.legend(fontsize="small")
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, dpi=110, format="png")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
