"""Results as pictures, from results.json and step.json alone."""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fastrl.bench import figures
from fastrl.bench.report import Results, Row, fastest, median, ratio

LEAST = 3  # points of a line
#: A shade of each part of a step: blue for those that fastrl computes.
PARTS = {"generation": "#a3abb3", "scoring": "#5aa9de", "forward": "#8b949e"}
PARTS |= {"loss": "#0f6fb0", "backward": "#6e7781", "optimizer": "#b6bdc4"}


def main(arguments: Sequence[str]) -> int:
    """Run ``fastrl bench plot`` and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="fastrl bench plot", description="Draw the plots of a run again, as SVG."
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="results or step.json")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the folder of each FILE")
    options = parser.parse_args(arguments)
    for path in options.files:
        out = path.parent if options.out is None else options.out
        try:
            drawn = draw(json.loads(path.read_text()), out)
        except (OSError, ValueError, ImportError) as error:
            parser.error(f"{path}: {error}")
        print("\n".join(map(str, drawn)))
    return 0


def draw(results: Results, out: Path) -> list[Path]:
    """Draw all pictures of a run: its cases beside fastrl, and sweeps; or the parts of a step.

    Args:
        results: The content of ``results.json`` or of ``step.json``.
        out: The folder of the pictures.

    Returns:
        The files, a light and a dark one of each picture.

    Raises:
        ValueError: ``results`` is neither.
        ImportError: matplotlib is missing.
    """
    if not isinstance(results, dict) or not {"cases", "variants"} & results.keys():
        raise ValueError("results must be those of `fastrl bench` or of `fastrl bench step`")
    if "variants" in results:
        return figures.save("step", lambda: step(results), out)
    drawn = figures.save("overview", lambda: overview(results), out) if results["cases"] else []
    if sweeps(results["cases"]):
        drawn += figures.save("time", lambda: lines(results, TIME), out)
        drawn += figures.save("memory", lambda: lines(results, MEMORY), out)
    return drawn


def draw_or_say(results: Results, out: Path, limit: float | None = None) -> None:
    """Draw all pictures and print their paths, or why there are none.

    Args:
        results: As in `draw`.
        out: As in `draw`.
        limit: When drawing ends, by the monotonic clock.
    """
    timed = limit is not None and hasattr(signal, "setitimer")
    try:
        if limit is not None and timed:
            signal.signal(signal.SIGALRM, _too_late)
            signal.setitimer(signal.ITIMER_REAL, max(0.001, limit - time.monotonic()))
        print(f"plots: {', '.join(str(path) for path in draw(results, out))}")
    except (ImportError, OSError, KeyboardInterrupt) as error:
        print(f"no plots: {error or 'interrupted'}")
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _too_late(number: int, frame: object) -> NoReturn:
    raise TimeoutError("the time was over; fastrl bench plot draws them")


class Quantity(NamedTuple):
    """What lines show: its title, the number of a provider, and how it is written."""

    title: str
    number: Callable[[Row], float | None]
    write: Callable[[float], str]


def _known_peak(row: Row) -> float | None:
    known = row["kind"] != "floor" and row["peak"] is not None
    return max(row["peak"], 1e6) if known else None  # resident memory cannot tell less


TIME = Quantity(
    "Time of a call", lambda row: median(row) if row["seconds"] else None, figures.in_seconds
)
MEMORY = Quantity(
    "Peak memory of a call, beyond its inputs",
    _known_peak,
    lambda value: figures.in_bytes(value) if value > 1e6 else "≤ 1 MB",
)


def lines(results: Results, quantity: Quantity) -> Any:
    """Return a quantity against tokens and against the vocabulary, wherever there is a sweep."""
    found = sweeps(results["cases"])
    rows = math.ceil(len(found) / 2)
    figure, grid = figures.panels(rows, 2, 1.3 + 2.8 * rows)
    for axes in grid.flat[len(found) :]:
        axes.set_axis_off()
    for (x, cases), axes in zip(found, grid.flat, strict=False):
        _panel(axes, cases, x, quantity)
    figures.legend(figure, figure.axes, quantity.title)
    figures.caption(figure, results["machine"])
    return figure


def tokens(case: Row) -> int:
    """Return the tokens of a case, which are the rows of its logits."""
    return int(case["shape"].get("rows") or math.prod(case["shape"].values()))


def vocabulary(case: Row) -> int:
    """Return the vocabulary of a case; 0 of operators that have none."""
    return int(case["shape"].get("vocabulary", 0))


def sweeps(cases: Iterable[Row]) -> list[tuple[Callable[[Row], int], list[Row]]]:
    """Return per operator, pass and dtype the cases that differ in tokens or vocabulary alone."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for case in cases:
        if any(row["seconds"] for row in case["providers"]):
            kind = tuple(case[name] for name in ("op", "step", "dtype", "variant"))
            kinds.setdefault(kind, []).append(case)
    found: list[tuple[Callable[[Row], int], list[Row]]] = []
    for own in kinds.values():
        for fixed, varied in ((vocabulary, tokens), (tokens, vocabulary)):
            same: dict[int, dict[int, Row]] = {}
            for case in own:
                same.setdefault(fixed(case), {})[varied(case)] = case
            longest = max(same.values(), key=len)
            if len(longest) >= LEAST:
                found.append((varied, [longest[x] for x in sorted(longest)]))
    return found


def _panel(axes: Any, cases: list[Row], x: Callable[[Row], int], quantity: Quantity) -> None:
    names = dict.fromkeys((row["name"], row["kind"]) for case in cases for row in case["providers"])
    seen: list[str] = []
    ends = []
    for name, kind in names:
        rows = [(x(one), row) for one in cases for row in one["providers"] if row["name"] == name]
        points = [(at, value) for at, row in rows if (value := quantity.number(row)) is not None]
        if not points:
            continue
        colour, marker = figures.look(name, kind)
        stroke = ":" if kind == "floor" else figures.STROKES[min(seen.count(colour), 2)]
        seen.append(colour)
        order = 3 if kind.startswith("fastrl") else 2
        style = {"color": colour, "marker": marker, "linestyle": stroke, "zorder": order}
        axes.plot(*zip(*points, strict=True), label=figures.short(name, kind), **style)
        if points[-1][0] == x(cases[-1]) and kind != "floor":
            ends.append((points[-1][1], colour))
    first = cases[0]
    of = {"forward": "", "backward": " backward", "both": " and gradient"}[first["step"]]
    axes.set_title(f"{first['op']}{of}")
    same = f"vocabulary {vocabulary(first)}" if x is tokens else f"{tokens(first)} tokens"
    about = [first["dtype"], first["variant"], same if vocabulary(first) else ""]
    along = "tokens" if x is tokens else "vocabulary"
    axes.set_xlabel(f"{along} ({', '.join(filter(None, about))})")
    if not seen:  # such as memory where nothing tells it
        axes.set_axis_off()
        return
    figures.sizes_axis(axes, [x(case) for case in cases])
    figures.log_axis(axes.yaxis, quantity.write)
    figures.mark_ends(axes, ends, quantity.write)


def overview(results: Results) -> Any:
    """Return every case: the time of each provider over fastrl's, and its error.

    Hollow markers are forms of a provider: in place, or in bfloat16 throughout. The reference,
    which defines the results and is not tuned, is left out.
    """
    cases = [(case, ours) for case in results["cases"] if (ours := fastest(case))]
    options = {"sharey": True, "width_ratios": (3, 2)}
    figure, ((times, errors),) = figures.panels(1, 2, 1.8 + 0.5 * len(cases), **options)
    for y, (case, ours) in enumerate(cases):
        for row in case["providers"]:
            if row["name"] == "fastrl reference" and row is not ours:
                continue
            colour, marker = figures.look(row["name"], row["kind"])
            label = figures.short(row["name"], row["kind"])
            style = {"color": colour, "marker": marker or "|", "label": label, "linestyle": ""}
            style["markerfacecolor"] = "none" if " in " in row["name"] else colour
            if row["seconds"]:
                times.plot([ratio(row, ours)], [y], **style)
            if row["seconds"] and row["error"] is not None:
                errors.plot([max(row["error"], 1e-9)], [y], **style)
        place = {"transform": times.get_yaxis_transform(), "fontsize": "x-small"}
        times.text(0, y - 0.25, case["name"], **place)
    times.set(ylim=(len(cases) - 0.6, -0.7), title="time, fastrl = 1 (left is faster)")
    times.set_yticks(range(len(cases)), [""] * len(cases))
    times.axvline(1, color=figures.LOOKS["fastrl"][0], linewidth=1)
    errors.set(title="error against float64")
    figures.log_axis(times.xaxis, lambda value: f"{value:g}")
    figures.log_axis(errors.xaxis, lambda value: f"{value:.0e}")
    figures.legend(figure, figure.axes, "")
    figures.caption(figure, results["machine"])
    return figure


def step(results: Results) -> Any:
    """Return the parts of a GRPO step: time as stacked bars, peak memory side by side."""
    figure, ((times,), (peaks,)) = figures.panels(2, 1, 7.0, height_ratios=(2, 5))
    variants = results["variants"]
    parts = list(dict.fromkeys(part["part"] for variant in variants for part in variant["parts"]))
    for y, variant in enumerate(variants):
        begin = 0.0
        for part in variant["parts"]:
            style = {"color": PARTS.get(part["part"], "#d0d0d0"), "label": part["part"]}
            times.barh([y], [part["seconds"]], left=begin, height=0.7, **style)
            begin += part["seconds"]
        times.text(
            begin, y, f"\u00a0{variant['failure'] or figures.in_seconds(begin)}", **figures.SMALL
        )
        places = [parts.index(part["part"]) + 0.4 * y for part in variant["parts"]]
        values = [part["peak"] or 0 for part in variant["parts"]]
        colour = figures.LOOKS["fastrl" if variant["name"] == "with fastrl" else "eager"][0]
        peaks.barh(places, values, height=0.36, color=colour, label=variant["name"])
        for place, value in zip(places, values, strict=True):
            peaks.text(value, place, f"\u00a0{figures.in_bytes(value)}", **figures.SMALL)
    times.set_yticks(range(len(variants)), [variant["name"] for variant in variants])
    peaks.set_yticks([place + 0.2 for place in range(len(parts))], parts)
    for axes, title, write in (
        (times, f"Time of a GRPO step ({results['model']})", figures.in_seconds),
        (peaks, "Peak memory of each part", figures.in_bytes),
    ):
        above = {"loc": "lower left", "bbox_to_anchor": (-0.14, 1), "borderaxespad": 0}
        figures.legend(axes, [axes], title, **above, ncols=6, handlelength=1)
        axes.xaxis.set_major_formatter(lambda value, _, write=write: write(value))
        axes.grid(visible=False, axis="y")
        axes.invert_yaxis()
        axes.margins(x=0.1)
    figures.caption(figure, results["machine"])
    return figure
