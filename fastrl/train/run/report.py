"""``report.html``: a run on one page that needs no network and runs no script.

Whatever a model, a data set or a setting says is text on the page: Jinja2 escapes it, what no
browser prints is written as its escape, and the page's policy forbids scripts and requests.
"""

import json
import platform
from collections.abc import Sequence
from dataclasses import MISSING, fields
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import torch
import transformers

from fastrl.train.config import LoopConfig
from fastrl.train.run.chart import chart
from fastrl.train.run.curves import Row, further, panels
from fastrl.train.run.json_lines import replace_file
from fastrl.train.run.run_directory import settings_of
from fastrl.train.run.samples import Samples
from fastrl.train.run.summary import MEASURED
from fastrl.train.run.terminal import printable

_LONGEST = 20_000  # characters of a text on the page


class _Setting(NamedTuple):
    name: str
    value: str
    default: str
    changed: bool


class _Phase(NamedTuple):
    name: str
    seconds: str
    share: str
    peak: str


def write_report(
    path: Path, loop: str, config: LoopConfig, rows: Sequence[Row], samples: Samples
) -> None:
    """Write the page atomically.

    Args:
        path: Where to.
        loop: The loop, such as ``"grpo"``.
        config: The settings of the run.
        rows: Its log.
        samples: Its samples.

    Raises:
        OSError: The file could not be written; a previous one is unchanged.
    """
    text = _template().render(
        title=f"{path.parent.name} · {loop}",
        facts=_facts(loop, config, rows),
        panels=[chart(*panel, rows) for panel in panels(rows)],
        further=[chart(*panel, rows) for panel in further(rows)],
        samples=_samples(samples),
        phases=_phases(rows),
        settings=_settings(config),
    )
    replace_file(path, text)


@cache
def _template() -> jinja2.Template:
    """The template; every text that enters it is made visible, then escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
    )
    return environment.get_template("report.html")


def _visible(value: Any) -> Any:
    """A text without characters that are not shown, and not longer than a page bears."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    more = len(value) - _LONGEST
    note = f" ... {more:,} more characters" if more > 0 else ""
    return printable(value[:_LONGEST], keep="\n\t") + note


def _facts(loop: str, config: LoopConfig, rows: Sequence[Row]) -> list[tuple[str, str]]:
    facts = [
        ("Loop", loop),
        ("Model", config.model or "small new model"),
        ("Steps", f"{int(rows[-1]['step']) if rows else 0} of {config.steps}"),
        ("Duration", str(timedelta(seconds=round(sum(_seconds(rows).values()))))),
    ]
    for key in MEASURED:
        name = key.replace("held_out_", "Held-out ")
        if measured := [row for row in rows if key in row]:
            first, last = measured[0], measured[-1]
            facts += [
                (f"{name} before", f"{first[key]:.3f}"),
                (f"{name} after", f"{last[key]:.3f} (step {last['step']:.0f})"),
            ]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return [*facts, ("Versions", f"Python {platform.python_version()}, {versions}")]


def _seconds(rows: Sequence[Row]) -> dict[str, float]:
    """The seconds of each phase, and the rest of the steps as ``other``."""
    total: dict[str, float] = {}
    other = 0.0
    for row in rows:
        phases = {k.removeprefix("seconds_"): v for k, v in row.items() if k.startswith("seconds_")}
        for name, seconds in phases.items():
            total[name] = total.get(name, 0.0) + seconds
        if row.get("tokens_per_second") and "tokens" in row:  # not in rows of earlier versions
            step = row["tokens"] / row["tokens_per_second"]
            other += max(0.0, step - sum(phases.values()) + phases.get("evaluate", 0.0))
    return {**total, **({"other": other} if other else {})}


def _phases(rows: Sequence[Row]) -> list[_Phase]:
    seconds = _seconds(rows)
    total = sum(seconds.values()) or 1.0
    phases = []
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        peak = max((row.get(f"peak_gb_{name}", 0.0) for row in rows), default=0.0)
        phases.append(
            _Phase(
                name,
                f"{seconds[name]:,.1f}",
                f"{seconds[name] / total:.1%}",
                f"{peak:.2f} GB" if peak else "",
            )
        )
    return phases


def _samples(samples: Samples) -> list[dict[str, Any]]:
    steps = dict(samples.recent)
    if samples.first:
        steps.setdefault(samples.first[0]["step"], samples.first)
    return [
        {
            **sample,
            "reward": f"{sample['reward']:.4g}",
            "parts": [f"{name} {value:.4g}" for name, value in sample.get("parts", {}).items()],
        }
        for step in sorted(steps, reverse=True)
        for sample in steps[step]
    ]


def _settings(config: LoopConfig) -> list[_Setting]:
    now, defaults = settings_of(config), _defaults(config)
    settings = [
        _Setting(name, _shown(value), _shown(defaults[name]), value != defaults[name])
        for name, value in now.items()
    ]
    return sorted(settings, key=lambda setting: not setting.changed)


def _defaults(config: LoopConfig) -> dict[str, Any]:
    try:
        return settings_of(type(config)())  # with what other defaults imply
    except ValueError:  # a setting must be given
        values = {f.name: None if f.default is MISSING else f.default for f in fields(config)}
        return json.loads(json.dumps(values))  # type: ignore[no-any-return]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
