"""Draw docs/pictures and write the numbers of the README, from the JSON in bench/results.

    python bench/pictures.py

tests/repo/test_pictures.py holds both to that JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from readme_numbers import written

from fastrl.bench.figures import legend, panels, save
from fastrl.bench.plots import MEMORY, TIME, lines, step

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PICTURES = ROOT / "docs" / "pictures"
COLOURS = ("#0f7dc2", "#009e73", "#b8609a", "#9a7d0a")
#: What `score_centering.py` logs.
CENTERING = {
    "held_out_reward": "held-out reward",
    "kl_sampler": "KL",
    "grad_norm": "gradient norm",
}


def main() -> None:
    for path in drawn(PICTURES):
        print(path.relative_to(ROOT))
    if results := read("cpu"):
        readme = ROOT / "README.md"
        readme.write_text(written(readme.read_text(), results))


def drawn(out: Path) -> list[Path]:
    """Draw the pictures whose results are there."""
    results = read("cpu")
    sources: dict[str, tuple[dict, Callable]] = {
        "curves": (read("curves"), curves),
        "score-centering": (read("score-centering"), centering),
        "step": (read("step-cpu"), step),
        "memory": (
            # over tokens, and over vocabulary at 4,096 tokens
            cases_of(
                results,
                lambda case: (
                    case["op"] == "linear_policy_loss"
                    and case["dtype"] == "float32"
                    and (at(case, rows=4096) or at(case, vocabulary=49152))
                ),
            ),
            lambda found: lines(found, MEMORY),
        ),
        # from hidden states in bfloat16, too, where fastrl is not always the fastest
        "time": (
            # and over vocabulary at 256 tokens
            cases_of(
                results,
                lambda case: (
                    ("linear" in case["op"] or case["dtype"] == "float32")
                    and (at(case, vocabulary=49152) or not at(case, rows=4096))
                ),
            ),
            lambda found: lines(found, TIME),
        ),
    }
    paths = []
    for name, (source, build) in sources.items():
        if source:
            paths += save(name, lambda build=build, source=source: build(source), out)
    return paths


def read(kind: str) -> dict:
    """Results of a kind; of several runs of `fastrl bench`, the cases of all."""
    found: dict = {}
    for path in sorted(RESULTS.glob(f"{kind}*.json")):
        one = json.loads(path.read_text())
        if "cases" in one:
            one["cases"] = found.get("cases", []) + one["cases"]
        found = one
    return found


def at(case: dict, **shape: int) -> bool:
    return shape.items() <= case["shape"].items()


def cases_of(results: dict, wanted: Callable[[dict], bool]) -> dict:
    """The results with some of their cases: of calls that trainers make as a whole."""
    return results and {
        **results,
        "cases": [
            case
            for case in results["cases"]
            if wanted(case)
            and case["step"] == ("forward" if case["op"] == "token_logprobs" else "both")
        ],
    }


def curves(studies: dict):
    """Lines of rewards by step, of each seed and of their mean: sampled, and held out."""
    figure, grid = panels(len(studies), 2, 0.4 + 3.9 * len(studies), sharex="row", sharey="row")
    figure.suptitle("Rewards by step: each seed, and the mean", x=0.01, ha="left", weight="bold")
    for row, study in zip(grid, studies.values(), strict=True):
        for axes, key in zip(row, ("reward", "held_out_reward"), strict=True):
            for colour, (method, seeds) in zip(COLOURS, study["curves"].items(), strict=False):
                seeds_and_mean(axes, [dict(run[key]) for run in seeds.values()], colour, method)
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
            for colour, (method, seeds) in zip(COLOURS, methods.items(), strict=True):
                seeds_and_mean(axes, [dict(run[key]) for run in seeds.values()], colour, method)
            if key == "kl_sampler":  # without a fault it is 0
                axes.set_yscale("log")
            else:
                runs = [dict(run[key]) for run in right.values()]
                means = [statistics.mean(run[at] for run in runs) for at in runs[0]]
                axes.plot(list(runs[0]), means, linestyle=":", color="#8a8a8a", label="no fault")
            axes.set_title(f"{label}: {fault}")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    legend(figure, [grid[0, 0]], "A sampler that is wrong: each seed, and the mean")
    return figure


def seeds_and_mean(axes, runs: list[dict], colour: str, label: str) -> None:
    """Draw a line for each seed, whose values are by step, and a wide one for their mean."""
    for run in runs:
        axes.plot(list(run), list(run.values()), color=colour, linewidth=1, alpha=0.4)
    means = [statistics.mean(run[at] for run in runs) for at in runs[0]]
    axes.plot(list(runs[0]), means, color=colour, linewidth=3, label=label)


if __name__ == "__main__":
    main()
