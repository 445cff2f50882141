"""How pictures look: SVG for light and for dark pages, the same bytes for the same numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Of text, and of lines behind the data. All other colours are legible on both pages.
PAGES = {"light": ("#1f2328", "#d1d9e0"), "dark": ("#e6edf3", "#3d444d")}
WIDTH = 8.6  # inches of 96 pixels: a README's width; text of 14 points is 8 on a phone
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so all machines measure text alike
    "font.size": 14,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.handletextpad": 0.5,
    "lines.linewidth": 2.2,
    "lines.markersize": 7,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "fastrl",
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    **dict.fromkeys(("xtick.minor.size", "ytick.minor.size"), 0),
}
#: Colour and marker by the kind of a provider, or the first word of a peer's name.
LOOKS = {
    "fastrl": ("#d55e00", "o"),
    "eager": ("#7f8790", "s"),
    "compile": ("#0f7dc2", "^"),
    "floor": ("#8a8a8a", ""),
    "trl": ("#009e73", "D"),
    "liger": ("#b8609a", "v"),
    "cut": ("#9a7d0a", "P"),
    "torch": ("#8a6fd1", "X"),
    "unsloth": ("#a0612f", "<"),
    "verl": ("#5d8a8a", ">"),
}
OTHER = ("#a08080", "*")
STROKES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))  # of providers that look alike otherwise
FONTS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"  # the reader's
SMALL = {"va": "center", "fontsize": "small"}
TEXT = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")


def save(name: str, build: Callable[[], Any], out: Path) -> list[Path]:
    """Write the figure that ``build`` returns, as NAME-light.svg and NAME-dark.svg.

    The metadata of a file list the numbers that it shows.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib import style
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'fastrl-kernels[bench]'") from error
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for page, (text, lines) in PAGES.items():
        colours = dict.fromkeys(TEXT, text) | dict.fromkeys(("axes.edgecolor", "grid.color"), lines)
        with style.context(["default", STYLE | colours]):
            figure = build()
            paths.append(out / f"{name}-{page}.svg")
            about = {"Date": None, "Title": name, "Description": described(figure)}
            figure.savefig(paths[-1], metadata=about)
        paths[-1].write_text(paths[-1].read_text().replace("'DejaVu Sans'", FONTS))
    return paths


def described(figure: Any) -> str:
    """Return the numbers that a figure shows, read from what is drawn."""
    lines = []
    for axes in figure.axes:
        lines.append(axes.get_title(loc="left"))
        for line in axes.lines:
            pairs = zip(line.get_xdata(), line.get_ydata(), strict=True)
            shown = ", ".join(f"{x:.4g}: {y:.4g}" for x, y in pairs)
            lines.append(f"{line.get_label()}: {shown}")
        for bars in axes.containers:
            shown = ", ".join(
                f"{bar.get_x():.4g}-{bar.get_x() + bar.get_width():.4g}" for bar in bars
            )
            lines.append(f"{bars.get_label()}: {shown}")
    return "\n".join(lines)


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure of README width and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def legend(target: Any, shown: list[Any], title: str, **options: Any) -> None:
    """Name once, below a title, what the axes ``shown`` have; fastrl first."""
    found: dict[str, Any] = {}
    for axes in shown:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    order = sorted(found, key=lambda label: not label.startswith("fastrl"))
    inches = 0.5 + 0.085 * max(map(len, order), default=0)  # of an entry
    options = {"loc": "outside upper left", "ncols": int(WIDTH / inches), **options}
    options |= {"title": title, "title_fontproperties": {"weight": "bold"}, "columnspacing": 1.2}
    target.legend([found[label] for label in order], order, alignment="left", **options)


def caption(figure: Any, machine: dict[str, str]) -> None:
    """Say below a figure what it was measured with."""
    words = [machine["device"], *(f"{name} {machine[name]}" for name in ("torch", "fastrl"))]
    figure.supxlabel(", ".join(words), x=0.01, ha="left", fontsize="small")


def look(name: str, kind: str) -> tuple[str, str]:
    """Return the colour and the marker of a provider, the same in all pictures."""
    word = re.split(r"\W", kind)[0]
    return LOOKS.get(word) or LOOKS.get(re.split(r"\W", name.lower())[0], OTHER)


def short(name: str, kind: str) -> str:
    """Return the name of a provider in a legend: of a library alone, where there is one."""
    own = kind != "peer" or name.startswith("torch ")
    return name.replace("bfloat16", "bf16") if own else name.split()[0]


def log_axis(axis: Any, write: Callable[[float], str]) -> None:
    """Make an axis logarithmic, with ticks at round numbers."""
    from matplotlib.ticker import LogLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 60 else (1,)))
    axis.set_major_formatter(lambda value, _: write(value))
    axis.axes.minorticks_off()


def sizes_axis(axes: Any, sizes: list[int]) -> None:
    """Make x logarithmic, with ticks at ``sizes``; close ones are written below one another."""
    axes.set_xscale("log")
    axes.minorticks_off()
    labels: list[str] = []
    last = 0.0
    for size in sizes:
        place = math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0])
        near = bool(labels) and place - last < 0.16 and not labels[-1].startswith("\n")
        labels.append("\n" * near + (str(size) if size < 10_000 else f"{size / 1000:.0f}k"))
        last = place
    axes.set_xticks(sizes, labels)


def mark_ends(axes: Any, ends: list[tuple[float, str]], write: Callable[[float], str]) -> None:
    """Write the last value of each line beside it, at least a line of text from the next."""
    low, high = map(math.log, axes.get_ylim())
    limit = 1.05
    for left, (value, colour) in enumerate(sorted(ends, reverse=True)):
        place = (math.log(value) - low) / (high - low)
        limit = max(min(limit, place), 0.1 * (len(ends) - 1 - left))
        axes.text(1.02, limit, write(value), color=colour, transform=axes.transAxes, **SMALL)
        limit -= 0.1


def in_seconds(value: float) -> str:
    """Write a time with its unit."""
    return _with_unit(value, {"s": 1.0, "ms": 1e-3, "µs": 1e-6})


def in_bytes(value: float) -> str:
    """Write an amount of memory with its unit."""
    return _with_unit(value, {"GB": 1e9, "MB": 1e6, "kB": 1e3})


def _with_unit(value: float, units: dict[str, float]) -> str:
    unit = next((unit for unit, size in units.items() if value >= 0.9995 * size), list(units)[-1])
    return f"{value / units[unit]:.3g} {unit}" if value else "0"
