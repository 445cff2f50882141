"""Results as pictures, from results.json and step.json alone."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastrl.bench.figures import (
    LOOKS,
    SMALL,
    STROKES,
    caption,
    in_bytes,
    in_seconds,
    legend,
    log_axis,
    look,
    mark_ends,
    panels,
    save,
    short,
    sizes_axis,
)
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
        return save("step", lambda: step(results), out)
    drawn = save("overview", lambda: overview(results), out) if results["cases"] else []
    if any(map(any, sweeps(results["cases"]))):
        drawn += save("time", lambda: time(results), out)
        drawn += save("memory", lambda: memory(results), out)
    return drawn


def time(results: Results) -> Any:
    """Return lines of the time per call, against tokens and against the vocabulary."""

    def took(row: Row) -> float | None:
        return median(row) if row["seconds"] else None

    return _sweep("Time of a call", results, took, in_seconds)


def memory(results: Results) -> Any:
    """Return lines of the peak memory beyond the inputs, against the same."""

    def peak(row: Row) -> float | None:
        known = row["kind"] != "floor" and row["peak"] is not None
        return max(row["peak"], 1e6) if known else None  # resident memory cannot tell less

    def write(value: float, _: object = None) -> str:
        return in_bytes(value) if value > 1e6 else "≤ 1 MB"

    return _sweep("Peak memory of a call, beyond its inputs", results, peak, write)


def tokens(case: Row) -> int:
    """Return the tokens of a case, which are the rows of its logits."""
    return int(case["shape"].get("rows") or math.prod(case["shape"].values()))


def vocabulary(case: Row) -> int:
    """Return the vocabulary of a case; 0 of operators that have none."""
    return int(case["shape"].get("vocabulary", 0))


def sweeps(cases: Iterable[Row]) -> list[tuple[list[Row], list[Row]]]:
    """Return per operator, pass and dtype the cases that differ in tokens or in the model alone."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for case in cases:
        if not any(row["seconds"] for row in case["providers"]):
            continue
        key = tuple(case[name] for name in ("op", "step", "dtype", "variant"))
        found.setdefault(key, []).append(case)
    pairs = [
        (_longest(own, vocabulary, tokens), _longest(own, tokens, vocabulary))
        for own in found.values()
    ]
    return [pair for pair in pairs if any(pair)]


def _longest(
    cases: list[Row], fixed: Callable[[Row], int], varied: Callable[[Row], int]
) -> list[Row]:
    lines: dict[int, dict[int, Row]] = {}
    for case in cases:
        lines.setdefault(fixed(case), {})[varied(case)] = case
    longest = max(lines.values(), key=len)
    return [longest[x] for x in sorted(longest)] if len(longest) >= LEAST else []


def _sweep(
    title: str,
    results: Results,
    number: Callable[[Row], float | None],
    write: Callable[..., str],
) -> Any:
    pairs = sweeps(results["cases"])
    lines = [line for pair in pairs for line in zip(pair, (tokens, vocabulary), strict=True)]
    lines = [(cases, x) for cases, x in lines if cases]
    rows = math.ceil(len(lines) / 2)
    figure, grid = panels(rows, 2, 1.3 + 2.8 * rows)
    for axes in grid.flat[len(lines) :]:
        axes.set_axis_off()
    for (cases, x), axes in zip(lines, grid.flat, strict=False):
        _lines(axes, cases, x, number, write)
    legend(figure, figure.axes, title)
    caption(figure, results["machine"])
    return figure


def _lines(
    axes: Any,
    cases: list[Row],
    x: Callable[[Row], int],
    number: Callable[[Row], float | None],
    write: Callable[..., str],
) -> None:
    names = dict.fromkeys((row["name"], row["kind"]) for case in cases for row in case["providers"])
    seen: list[str] = []
    ends = []
    for name, kind in names:
        rows = [
            (x(case), row) for case in cases for row in case["providers"] if row["name"] == name
        ]
        points = [(at, value) for at, row in rows if (value := number(row)) is not None]
        if not points:
            continue
        colour, marker = look(name, kind)
        stroke = ":" if kind == "floor" else STROKES[min(seen.count(colour), len(STROKES) - 1)]
        seen.append(colour)
        order = 3 if kind.startswith("fastrl") else 2
        style = {"color": colour, "marker": marker, "linestyle": stroke, "zorder": order}
        axes.plot(*zip(*points, strict=True), label=short(name, kind), **style)
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
    sizes_axis(axes, [x(case) for case in cases])
    log_axis(axes.yaxis, write)
    mark_ends(axes, ends, write)


def overview(results: Results) -> Any:
    """Return every case: the time of each provider over fastrl's, and its error.

    Hollow markers are forms of a provider: in place, or in bfloat16 throughout. The reference,
    which defines the results and is not tuned, is left out.
    """
    cases = [(case, ours) for case in results["cases"] if (ours := fastest(case))]
    options = {"sharey": True, "width_ratios": (3, 2)}
    figure, ((times, errors),) = panels(1, 2, 1.8 + 0.5 * len(cases), **options)
    for y, (case, ours) in enumerate(cases):
        for row in case["providers"]:
            if row["name"] == "fastrl reference" and row is not ours:
                continue
            colour, marker = look(row["name"], row["kind"])
            label = short(row["name"], row["kind"])
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
    times.axvline(1, color=LOOKS["fastrl"][0], linewidth=1)
    errors.set(title="error against float64")
    log_axis(times.xaxis, lambda value, _: f"{value:g}")
    log_axis(errors.xaxis, lambda value, _: f"{value:.0e}")
    legend(figure, figure.axes, "")
    caption(figure, results["machine"])
    return figure


def step(results: Results) -> Any:
    """Return the parts of a GRPO step: time as stacked bars, peak memory side by side."""
    figure, ((times,), (peaks,)) = panels(2, 1, 7.0, height_ratios=(2, 5))
    variants = results["variants"]
    parts = list(dict.fromkeys(part["part"] for variant in variants for part in variant["parts"]))
    for y, variant in enumerate(variants):
        begin = 0.0
        for part in variant["parts"]:
            style = {"color": PARTS.get(part["part"], "#d0d0d0"), "label": part["part"]}
            times.barh([y], [part["seconds"]], left=begin, height=0.7, **style)
            begin += part["seconds"]
        times.text(begin, y, f" {variant['failure'] or in_seconds(begin)}", **SMALL)
        places = [parts.index(part["part"]) + 0.4 * y for part in variant["parts"]]
        values = [part["peak"] or 0 for part in variant["parts"]]
        colour = LOOKS["fastrl" if variant["name"] == "with fastrl" else "eager"][0]
        peaks.barh(places, values, height=0.36, color=colour, label=variant["name"])
        for place, value in zip(places, values, strict=True):
            peaks.text(value, place, f" {in_bytes(value)}", **SMALL)
    times.set_yticks(range(len(variants)), [variant["name"] for variant in variants])
    peaks.set_yticks([place + 0.2 for place in range(len(parts))], parts)
    for axes, title, write in (
        (times, "Time of a GRPO step", in_seconds),
        (peaks, "Peak memory of each part", in_bytes),
    ):
        legend(
            axes,
            [axes],
            title,
            loc="lower left",
            bbox_to_anchor=(-0.15, 1),
            borderaxespad=0,
            ncols=6,
        )
        axes.xaxis.set_major_formatter(write)
        axes.grid(visible=False, axis="y")
        axes.invert_yaxis()
        axes.margins(x=0.1)
    caption(figure, results["machine"])
    return figure
