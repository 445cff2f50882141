"""The tables of the README, between its markers, from results of `fastrl bench`."""

from __future__ import annotations

import re
import textwrap

from fastrl.bench.figures import in_seconds
from fastrl.bench.report import fastest, head, median, ratio

BLOCK = re.compile(r"(?<=<!-- numbers:begin -->\n).*(?=<!-- numbers:end -->)", re.DOTALL)
#: What is called, its pass, rows and vocabulary.
WORK = {
    "log-probability, forward": ("token_logprobs", "forward", 256, 151936),
    "loss and gradient": ("logits_policy_loss", "both", 256, 151936),
    "the same from hidden states": ("linear_policy_loss", "both", 1024, 49152),
}
TIE = 0.95  # of our time: what differs by less is not called faster
KINDS = ("fastrl in place", "compile", "eager", "peer")
MOST_ERROR = 0.1  # of the largest gradient, beyond which an answer is not one


def written(readme: str, results: dict) -> str:
    """Put the tables of these results into the README."""
    tables = (conditions, times, slower, memory)
    text = "".join(f"\n{table(results)}\n" for table in tables) + "\n"
    readme, places = BLOCK.subn(lambda _: text, readme)
    if places != 1:
        raise ValueError(f"README.md must have the markers of its tables once, got {places}")
    return readme


def conditions(results: dict) -> str:
    made = results["machine"]
    text = f"{made['device']}; torch {made['torch']}, {results['date'][:10]}. Times of others are "
    text += "multiples of fastrl's, in each column of the fastest with an error below "
    text += f"{MOST_ERROR:.0%}; memory is the peak of a call beyond its inputs. Commands and all "
    text += "cases, with their errors: "
    return "\n".join(textwrap.wrap(f"{text}`bench/results/cpu-*.json`.", 100))


def times(results: dict) -> str:
    """One row per work and dtype."""
    columns = ["work", "tokens x vocabulary", "dtype", "fastrl", "fastrl in place"]
    lines = head([*columns, "torch.compile", "eager", "other library"])
    for work, (_, _, rows, vocabulary) in WORK.items():
        for dtype in ("float32", "bfloat16"):
            case = measured(results, work, dtype)
            ours = fastest(case)
            cells = [work, f"{rows} x {vocabulary}", dtype, in_seconds(median(ours))]
            for kind in KINDS:
                best = fastest(right(case), kind)
                name = f"{best['name']}, " if best and kind == "peer" else ""
                cells.append(f"{name}{ratio(best, ours):.2g}" if best else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measured(results: dict, work: str, dtype: str) -> dict:
    """The case of a work, in which fastrl has a time."""
    op, step, rows, vocabulary = WORK[work]
    size = {"op": op, "step": step, "dtype": dtype, "variant": ""}
    case = next(iter(matching(results, size, rows, vocabulary)), None)
    if case is None or fastest(case) is None:
        raise ValueError(f"results must have fastrl's time of {op}, {size}, {rows} rows")
    return case


def slower(results: dict) -> str:
    """Name the works in which torch is faster, with both errors."""
    lines = []
    for work in WORK:
        for dtype in ("float32", "bfloat16"):
            case = measured(results, work, dtype)
            ours = fastest(case)
            for torch in (fastest(right(case), "compile"), fastest(right(case), "eager")):
                if torch and ratio(torch, ours) < TIE:
                    text = f"{torch['name']} is faster for *{work}* in {dtype} on this CPU, with "
                    text += f"an error of {torch['error']:.1e} of the largest gradient (fastrl: "
                    lines += textwrap.wrap(f"{text}{ours['error']:.1e}).", 100)
    return "\n".join(lines)


def right(case: dict) -> dict:
    """The case without answers that are far from float64's."""
    rows = [row for row in case["providers"] if (row["error"] or 0) < MOST_ERROR]
    return {**case, "providers": rows}


def memory(results: dict) -> str:
    """Peak MB of the loss and all gradients from hidden states, by rows."""
    op, step, _, vocabulary = WORK["the same from hidden states"]
    size = {"op": op, "step": step, "dtype": "float32", "variant": ""}
    cases = sorted(
        matching(results, size, None, vocabulary), key=lambda case: case["shape"]["rows"]
    )
    known = [row for case in cases for row in case["providers"] if row["peak"] is not None]
    names = list(dict.fromkeys(row["name"] for row in known if row["kind"] != "floor"))
    lines = head([f"tokens (x {vocabulary}, float32), peak MB", *names])
    for case in cases:
        peaks = {row["name"]: row["peak"] for row in case["providers"]}
        cells = ["" if peaks.get(name) is None else f"{peaks[name] / 1e6:.0f}" for name in names]
        lines.append(f"| {case['shape']['rows']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def matching(results: dict, size: dict, rows: int | None, vocabulary: int) -> list[dict]:
    return [
        case
        for case in results["cases"]
        if all(case[name] == value for name, value in size.items())
        and case["shape"]["vocabulary"] == vocabulary
        and rows in (None, case["shape"]["rows"])
    ]
