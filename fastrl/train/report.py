"""``report.html``, a run on one page without network or scripts, and ``curves.png``.

Strings from a model, a data set or a setting can only be text on the page: Jinja2 escapes them,
characters that no browser shows are written as escapes, and the page's policy forbids scripts and
requests.
"""

import base64
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch

from fastrl.train.checkpoint import replace_file
from fastrl.train.config import RunConfig
from fastrl.train.loading import find_device
from fastrl.train.records import Row

_PHASES = ("generate", "score", "logprobs", "learn", "evaluate")
_PANELS = {
    "reward": ("reward", "held_out_reward"),
    "reward deviation": ("reward_std",),
    "reward parts": (),  # the keys that begin with reward/
    "completions": ("reward_missing", "reward_failures"),
    "KL": ("kl", "kl_old", "kl_sampler"),
    "entropy": ("entropy", "teacher_entropy"),
    "divergence from the teacher": ("divergence",),
    "agreement with the teacher": ("teacher_agreement",),
    "completion length": ("length",),
    "clip fraction": ("clip_fraction",),
    "value": ("explained_variance", "value_loss"),
    "gradient norm": ("grad_norm",),
    "learning rate": ("learning_rate",),
    "seconds per phase": tuple(f"seconds_{phase}" for phase in _PHASES),
    "peak memory per phase, GB": tuple(f"peak_gb_{phase}" for phase in _PHASES),
    "tokens per second": ("tokens_per_second",),
    "tokens in the model": ("real_tokens", "padded_tokens", "learned_tokens"),
    "share of completions": ("truncated", "left_out", "informative"),
}
_COLUMNS = 3  # of panels, which are as large as legends need
_SHOWN = 30  # samples, the last ones
_LONGEST = 20_000  # characters of a text on the page
_LARGEST = 3e38  # the largest float32; matplotlib finds no ticks for much larger numbers


def write_report(
    directory: Path, config: RunConfig, rows: Sequence[Row], samples: Sequence[Mapping[str, Any]]
) -> None:
    """Write both files atomically."""
    import jinja2

    curves = directory / "curves.png"
    facts, phases = _facts(config, rows), _phases(rows)
    memory = find_device(config.device).type != "cpu"  # there it is the process's in every phase
    if not memory:
        peak = max((peak for *_, peak in phases), default=0.0) or math.nan
        facts["Peak memory of the process, GB"] = f"{peak:.2f}"
        rows = [{k: v for k, v in row.items() if not k.startswith("peak_gb_")} for row in rows]
    draw(rows, curves)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
    )
    page = environment.get_template("report.html").render(
        title=f"{directory.name} · {config.loop}",
        facts=facts,
        curves=base64.b64encode(curves.read_bytes()).decode(),
        samples=sorted(samples[-_SHOWN:], key=lambda sample: -sample["step"]),
        phases=phases,
        seconds=sum(seconds for _, seconds, _ in phases) or 1.0,
        memory=memory,
        settings=_settings(config),
    )
    replace_file(directory / "report.html", page)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot the quantities in ``rows`` against the step, with related ones in one panel."""
    from matplotlib import rc_context  # takes half a second
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = dict.fromkeys(key for row in rows for key in row)
    parts = tuple(key for key in known if "reward/" in key)
    of_panel = {
        title: [key for key in (parts if title == "reward parts" else keys) if key in known]
        for title, keys in _PANELS.items()
    }
    panels = {title: keys for title, keys in of_panel.items() if keys}
    across = max(1, min(_COLUMNS, len(panels)))
    down = max(1, -(-len(panels) // across))
    partial = path.with_name(f".{path.name}.partial")
    with rc_context({"text.parse_math": False}):  # a name with $ is not a formula
        figure = Figure(figsize=(4.4 * across, 3 * down), layout="constrained")
        FigureCanvasAgg(figure)
        for place, (title, keys) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(down, across, place)
            for key in keys:
                points = [(row["step"], row[key]) for row in rows if key in row]
                shown = [(x, y) for x, y in points if -_LARGEST <= y <= _LARGEST]
                axes.plot(*zip(*shown, strict=True), marker="o", markersize=2) if shown else None
                label = printable(key.removeprefix("seconds_").removeprefix("peak_gb_"))
                axes.lines[-1].set_label(label) if shown else None
            axes.set(title=title, xlabel="step")
            axes.grid(alpha=0.3)
            if len(axes.lines) > 1:
                axes.legend(fontsize="small")
        figure.savefig(partial, dpi=100, format="png")
    os.replace(partial, path)


def printable(text: str, keep: str = "") -> str:
    """Return the text with Python's escapes for every character that no terminal prints.

    These are control characters, overrides of the writing direction, other invisible marks and lone
    surrogates, except characters in ``keep``.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def _visible(value: Any) -> Any:
    """Return a text with escapes for invisible characters, cut to `_LONGEST` characters."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    more = len(value) - _LONGEST
    note = f" ... {more:,} more characters" if more > 0 else ""
    return printable(value[:_LONGEST], keep="\n\t") + note


def _facts(config: RunConfig, rows: Sequence[Row]) -> dict[str, str]:
    import transformers  # takes half a second, also of an answer to a wrong option

    measured = [row for row in rows if "held_out_reward" in row]
    facts = {
        "Model": config.model or "small new model",
        "Steps": f"{int(rows[-1]['step']) if rows else 0} of {config.steps}",
        "Minutes": f"{sum(seconds for _, seconds, _ in _phases(rows)) / 60:.1f}",
    }
    if measured:
        facts["Held-out reward before"] = f"{measured[0]['held_out_reward']:.3f}"
        last = measured[-1]
        facts["Held-out reward after"] = f"{last['held_out_reward']:.3f} (step {last['step']:.0f})"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return {**facts, "Versions": f"Python {platform.python_version()}, {versions}"}


def _phases(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Return name, seconds and peak memory in GB of each phase, the longest phase first."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("seconds_"))
    phases = [
        (
            name,
            sum(row.get(f"seconds_{name}", 0.0) for row in rows),
            max(row.get(f"peak_gb_{name}", 0.0) for row in rows),
        )
        for name in (key.removeprefix("seconds_") for key in keys)
    ]
    return sorted(phases, key=lambda phase: -phase[1])


def _settings(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return name, value and default of each setting, the changed ones first."""
    defaults = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    now = {f.name: getattr(config, f.name) for f in fields(config)}
    order = sorted(now, key=lambda name: now[name] == defaults[name])
    return [(name, str(now[name]), str(defaults[name])) for name in order]
