"""The tables of the README, between its markers, from results of `fastrl bench`."""

from __future__ import annotations

import re
import textwrap

from results import matching

from fastrl.bench.figures import in_seconds
from fastrl.bench.report import fastest, head, median, ratio

BLOCK = re.compile(r"(?<=<!-- numbers:begin -->\n).*(?=<!-- numbers:end -->)", re.DOTALL)
FROM_HIDDEN_STATES = "loss and gradient from hidden states"
#: What is called, its pass, rows and vocabulary.
WORK = {
    "log-probability": ("token_logprobs", "forward", 256, 151936),
    "loss and gradient from logits": ("logits_policy_loss", "both", 256, 151936),
    FROM_HIDDEN_STATES: ("linear_policy_loss", "both", 1024, 49152),
}
MEASURED = [(work, dtype) for work in WORK for dtype in ("float32", "bfloat16")]
TIE = 0.95  # of our time: smaller differences are not called faster
KINDS = ("fastrl in place", "compile", "eager", "peer")
LEAST_ROWS = 4096  # of the table of memory; the picture has fewer
MOST_ERROR = 0.1  # of the largest gradient, beyond which an answer is not one


def in_readme(readme: str, results: dict) -> str:
    """Put the tables of these results into the README."""
    tables = (conditions, times, slower, memory)
    text = "".join(f"\n{table(results)}\n" for table in tables) + "\n"
    readme, places = BLOCK.subn(lambda _: text, readme)
    if places != 1:
        raise ValueError(f"README.md must have the markers of its tables once, got {places}")
    return readme


def conditions(results: dict) -> str:
    made = results["machine"]
    text = f"Measured on {made['device']}; torch {made['torch']}, {results['date'][:10]}. 2.4x "
    text += "takes 2.4 times as long as fastrl; alternatives that are faster are in bold. Each "
    text += f"column has the fastest variant with an error below {MOST_ERROR:.0%}. TRL runs its "
    text += "CPU code. `bench/results/cpu-*.json` has all cases, with commands and errors."
    return "\n".join(textwrap.wrap(text, 100))


def times(results: dict) -> str:
    """One row per work and dtype."""
    columns = ["work", "tokens x vocabulary", "dtype", "fastrl", "fastrl in place"]
    lines = head([*columns, "torch.compile", "eager", "other library"])
    for work, dtype in MEASURED:
        case = measured(results, work, dtype)
        ours = fastest(case)
        _, _, rows, vocabulary = WORK[work]
        cells = [work, f"{rows} x {vocabulary}", dtype, in_seconds(median(ours))]
        for kind in KINDS:
            best = fastest(right(case), kind)
            name = f"{best['name']}, " if best and kind == "peer" else ""
            cells.append(f"{name}{multiple(best, ours)}" if best else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def multiple(row: dict, ours: dict) -> str:
    text = f"{ratio(row, ours):.2g}x"
    faster = ratio(row, ours) < TIE and not row["kind"].startswith("fastrl")
    return f"**{text}**" if faster else text


def measured(results: dict, work: str, dtype: str) -> dict:
    """The case of a work, in which fastrl has a time."""
    wanted = dict(zip(("op", "step", "rows", "vocabulary"), WORK[work], strict=True))
    case = next(iter(matching(results, **wanted, dtype=dtype, variant="")), None)
    if case is None or fastest(case) is None:
        raise ValueError(f"results must have fastrl's time of {wanted} in {dtype}")
    return case


def slower(results: dict) -> str:
    """Name the works in which torch is faster, with the errors."""
    lines = []
    for work, dtype in MEASURED:
        case = measured(results, work, dtype)
        ours = fastest(case)
        rivals = [fastest(right(case), kind) for kind in ("compile", "eager")]
        rivals = [row for row in rivals if row and ratio(row, ours) < TIE]
        if rivals:
            names = " and ".join(row["name"] for row in rivals)
            errors = " and ".join(dict.fromkeys(f"{row['error']:.1%}" for row in rivals))
            text = f"On this CPU, {names} {'are' if rivals[1:] else 'is'} faster for *{work}* in "
            text += f"{dtype}, with an error of {errors} of the largest gradient (fastrl: "
            lines += textwrap.wrap(f"{text}{ours['error']:.2%}).", 100)
    return "\n".join(lines)


def right(case: dict) -> dict:
    """The case without answers that are far from float64's."""
    rows = [row for row in case["providers"] if (row["error"] or 0) < MOST_ERROR]
    return {**case, "providers": rows}


def memory(results: dict) -> str:
    """Peak MB of the loss and all gradients from hidden states."""
    op, step, *_ = WORK[FROM_HIDDEN_STATES]
    cases = matching(results, op=op, step=step, dtype="float32", variant="")
    shapes = {(c["shape"]["vocabulary"], c["shape"]["rows"]): c["providers"] for c in cases}
    shapes = {shape: shapes[shape] for shape in sorted(shapes) if shape[1] >= LEAST_ROWS}
    known = [row for rows in shapes.values() for row in rows if row["peak"] is not None]
    names = list(dict.fromkeys(row["name"] for row in known if row["kind"] != "floor"))
    lines = head(["peak MB in float32: tokens x vocabulary", *names])
    for (vocabulary, tokens), rows in shapes.items():
        peaks = {row["name"]: row["peak"] for row in rows}
        cells = ["" if peaks.get(name) is None else f"{peaks[name] / 1e6:.0f}" for name in names]
        lines.append(f"| {tokens} x {vocabulary} | {' | '.join(cells)} |")
    return "\n".join(lines)
