"""Draw docs/pictures and write the numbers of the README, from the JSON in bench/results.

    python bench/documents/pictures.py

The files of results are rewritten, too, with a case or a run in a line. tests/repo/test_pictures.py
holds all of it to that JSON.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import results
from readme_numbers import in_readme

from fastrl.bench.figures import legend, panels, save
from fastrl.bench.plots import MEMORY, TIME, lines, step

PICTURES = results.ROOT / "docs" / "pictures"
COLOURS = ("#0f7dc2", "#009e73", "#b8609a", "#9a7d0a")
#: What `score_centering.py` logs.
CENTERING = {
    "held_out_reward": "held-out reward",
    "kl_sampler": "KL",
    "grad_norm": "gradient norm",
}


def main() -> None:
    for path in results.RESULTS.glob("*.json"):
        path.write_text(results.written(json.loads(path.read_text())))
    for path in drawn(PICTURES):
        print(path.relative_to(results.ROOT))
    if measured := results.read("cpu"):
        readme = results.ROOT / "README.md"
        readme.write_text(in_readme(readme.read_text(), measured))


def drawn(out: Path) -> list[Path]:
    """Draw the pictures whose results are there."""
    measured = results.read("cpu")
    sources = {
        "curves": (results.read("curves"), curves),
        "score-centering": (results.read("score-centering"), centering),
        "step": (results.read("step-cpu"), step),
        "memory": (some_cases(measured, in_memory), lambda found: lines(found, MEMORY)),
        "time": (some_cases(measured, in_time), lambda found: lines(found, TIME)),
    }
    paths = []
    for name, (source, build) in sources.items():
        if source:
            paths += save(name, lambda build=build, source=source: build(source), out)
    return paths


def some_cases(measured: dict, wanted) -> dict:
    """The results with some of their cases: of calls that trainers make as a whole."""
    if not measured:
        return {}
    steps = {"token_logprobs": "forward"}
    whole = [case for case in measured["cases"] if case["step"] == steps.get(case["op"], "both")]
    return {**measured, "cases": [case for case in whole if wanted(case)]}


def in_memory(case: dict) -> bool:
    """Whether a case is one over tokens, or over vocabulary at 4,096 tokens."""
    shape, kind = case["shape"], (case["op"], case["dtype"])
    shown = shape["rows"] == 4096 or shape["vocabulary"] == 49152
    return kind == ("linear_policy_loss", "float32") and shown


def in_time(case: dict) -> bool:
    """Whether a case is one over tokens, or over vocabulary at 256 tokens.

    From hidden states in bfloat16, too, where fastrl is not always the fastest.
    """
    shape = case["shape"]
    shown = shape["vocabulary"] == 49152 or shape["rows"] != 4096
    return shown and ("linear" in case["op"] or case["dtype"] == "float32")


def curves(studies: dict):
    """Lines of rewards by step, of each seed and of their mean: sampled, and held out."""
    figure, grid = panels(len(studies), 2, 0.4 + 3.9 * len(studies), sharex="row", sharey="row")
    figure.suptitle("Rewards by step: each seed, and the mean", x=0.01, ha="left", weight="bold")
    for row, study in zip(grid, studies.values(), strict=True):
        for axes, key in zip(row, ("reward", "held_out_reward"), strict=True):
            by_method(axes, study["curves"], key)
            if study["teacher"]:
                final = study["teacher"][key][-1][1]
                axes.axhline(final, linestyle=":", color="#8a8a8a", label="teacher")
            axes.set(xlabel="step", ylim=(0, 1.03))
        row[0].set_title(f"sampled: {study['title']}")
        row[1].set_title("greedy, on held-out prompts")
        legend(row[1], [row[1]], "", loc="lower right", ncols=1)
    return figure


def centering(study: dict):
    """Lines by step below each other, for the two faults of the sampler beside each other."""
    faults = {name: study["curves"][name] for name, how in study["faults"].items() if how}
    right = study["curves"]["no fault"]["plain"]
    figure, grid = panels(len(CENTERING), len(faults), 9.6, sharex=True, sharey="row")
    for row, (key, label) in zip(grid, CENTERING.items(), strict=True):
        for axes, (fault, methods) in zip(row, faults.items(), strict=True):
            by_method(axes, methods, key)
            if key == "kl_sampler":  # without a fault it is 0
                axes.set_yscale("log")
            else:
                mean(axes, right, key, linestyle=":", color="#8a8a8a", label="no fault")
            axes.set_title(f"{label}: {fault}")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    legend(figure, [grid[0, 0]], "A sampler that is wrong: each seed, and the mean")
    return figure


def by_method(axes, methods: dict[str, dict], key: str) -> None:
    """Draw a line for each seed of each method, and a wide one for their mean."""
    for colour, (method, seeds) in zip(COLOURS, methods.items(), strict=False):
        for run in seeds.values():
            axes.plot(*zip(*run[key], strict=True), color=colour, linewidth=1, alpha=0.4)
        mean(axes, seeds, key, color=colour, linewidth=3, label=method)


def mean(axes, seeds: dict[str, dict], key: str, **style) -> None:
    runs = [dict(run[key]) for run in seeds.values()]
    axes.plot(list(runs[0]), [statistics.mean(run[at] for run in runs) for at in runs[0]], **style)


if __name__ == "__main__":
    main()
