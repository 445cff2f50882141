"""Keep what bench/gpu.py found: bench/results/<gpu>-<date>.jsonl, .md and .png.

    python bench/gpu_results.py --out build/gpu/peers

The plot has a panel for each kind of work, and in it the time of every provider relative to the
fastest backend of fastrl, on a logarithmic axis: bars to the left of 1 are faster than fastrl.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from gpu_journal import NAME, Journal
from gpu_report import markdown
from gpu_targets import median

RESULTS = Path(__file__).parent / "results"
LEFT_OUT = ("scaled", "floor")  # kinds that do other work
ANOTHER = " in place", " autocast"  # of fastrl's kinds, measured beside the plain one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu/peers"), help="of gpu.py")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    entries = Journal(given.out).entries()
    if not entries:
        parser.error(
            f"{given.out / NAME} has no results; `python bench/gpu.py --out {given.out}` does"
        )
    given.results.mkdir(parents=True, exist_ok=True)
    name = name_of(next(one["machine"] for one in entries if "machine" in one))
    stem = given.results / name
    shutil.copyfile(given.out / NAME, f"{stem}.jsonl")
    Path(f"{stem}.md").write_text(markdown(entries))
    plot(relative_times(entries), Path(f"{stem}.png"), name)
    print(f"written: {stem}.jsonl, .md and .png")


def name_of(machine: dict[str, str]) -> str:
    """Return GPU and date, as in `h100-80gb-hbm3-2026-11-23`."""
    gpu = next((value for name, value in machine.items() if name.startswith("name,")), "cpu")
    words = gpu.split(",")[0].lower().replace("nvidia", "")
    return re.sub(r"[^a-z0-9]+", "-", f"{words} {machine['date']}").strip("-")


def relative_times(entries: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return each provider's time relative to fastrl's fastest backend, by op and case."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for one in entries:
        case = one.get("result", {})
        rows = [
            row
            for row in case.get("providers", ())
            if row["samples"] and row["kind"] not in LEFT_OUT and not row["kind"].endswith(ANOTHER)
        ]
        ours = [median(row) for row in rows if row["kind"].startswith("fastrl")]
        if ours:
            name = f"{case['shape']} {case['dtype']}, {case['work']}"
            times = {row["provider"]: median(row) / min(ours) for row in rows}
            found.setdefault(case["op"], {})[name] = times
    return found


def plot(found: dict[str, dict[str, dict[str, float]]], path: Path, title: str) -> None:
    """Draw a panel for each op, with a group of bars for each case."""
    heights = [sum(len(times) + 1 for times in cases.values()) for cases in found.values()]
    figure, panels = plt.subplots(
        len(found),
        figsize=(10, 0.18 * sum(heights) + len(found)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    names = {name for cases in found.values() for times in cases.values() for name in times}
    colors = {name: f"C{i % 10}" for i, name in enumerate(sorted(names))}
    for (op, cases), panel in zip(found.items(), panels[:, 0], strict=True):
        place = 0
        for case, times in cases.items():
            panel.text(0.01, place, case, transform=panel.get_yaxis_transform(), fontsize=7)
            for name, ratio in sorted(times.items(), key=lambda pair: pair[1]):
                place += 1
                panel.barh(place, ratio - 1, left=1, color=colors[name], height=0.8)
                panel.annotate(f" {name} {ratio:.2f}", (max(ratio, 1), place), va="center", size=6)
            place += 1
        panel.set(title=op, xscale="log", yticks=[], xlabel="time / fastest backend of fastrl")
        panel.margins(x=0.12, y=0)
        panel.set_ylim(place, -1.5)
        panel.axvline(1, color="black", linewidth=0.8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
