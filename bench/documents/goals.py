"""What the project aims at, held against the results of a run.

    fastrl bench --out build/bench
    python bench/documents/goals.py build/bench/results.json

Each goal is a ratio of two times of one interleaved case, against the fastest provider of its kind,
whatever that one's error. Goals whose case was not measured are listed as such.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

from fastrl.bench.report import Results, Row, fastest, ratio


class Goal(NamedTuple):
    """A limit of a ratio for the cases whose names match.

    ``against`` is a kind of provider, or several with a bar between them. ``speed`` is the least
    that its time may be, relative to ours; ``times`` the most that ours may be, relative to it.
    """

    case: str
    against: str
    speed: float | None = None
    times: float | None = None
    ours: str = "fastrl"


_HEAD_GRADIENTS = "linear_policy_loss, both, {}, (float32|bfloat16)$"
GOALS = {
    "cpu": [
        Goal("token_logprobs, forward", "compile", speed=2),
        Goal("token_logprobs, forward", "eager", speed=4),
        Goal("logits_policy_loss, both", "compile", speed=5, ours="fastrl in place"),
        Goal("logits_policy_loss, both", "eager", speed=7, ours="fastrl in place"),
        Goal("logits_policy_loss, both", "floor", times=2.5, ours="fastrl in place"),
        Goal(_HEAD_GRADIENTS.format(".*"), "floor", times=1.25),
        Goal(_HEAD_GRADIENTS.format(".*"), "peer", speed=2.5),
        Goal("linear_divergence, both", "floor", times=1.15),
        Goal("linear_divergence, both, .*float32", "peer", speed=2),
        Goal("gae", "eager", speed=200),
    ],
    "cuda": [
        # the copy reads and writes: half of its time is a pass over the logits
        Goal("token_stats, forward, .*8192 x 151936, bfloat16$", "floor", times=0.5 / 0.85),
        Goal("logits_policy_loss, both, .*8192 x 151936, bfloat16$", "floor", times=1 / 0.8),
        Goal(_HEAD_GRADIENTS.format(".*8192 x .*"), "peer|eager|compile", speed=1),
        Goal(_HEAD_GRADIENTS.format("llama-3.1-8b, 8192 x .*"), "floor", times=1.15),
        Goal(_HEAD_GRADIENTS.format("qwen2.5-0.5b, 8192 x .*"), "floor", times=1.5),
    ],
}


def table(found: Results) -> list[str]:
    """Return a line for each goal and case."""
    device = found["cases"][0]["device"] if found["cases"] else "cpu"
    lines = [
        "| case | ours | against | found | goal | |",
        "| --- | --- | --- | ---: | ---: | --- |",
    ]
    for goal in GOALS[device]:
        cases = [case for case in found["cases"] if re.match(goal.case, case["name"])]
        rows = [line for case in cases if (line := _line(goal, case))]
        lines += rows or [f"| {goal.case} | {goal.ours} | {goal.against} | not measured | | |"]
    return lines


def _line(goal: Goal, case: Row) -> str:
    ours, other = fastest(case, goal.ours), fastest(case, *goal.against.split("|"))
    if ours is None or other is None:
        return ""
    if goal.speed is not None:
        value, limit = ratio(other, ours), f"at least {goal.speed:g} times as fast"
        met = value >= goal.speed
    else:
        assert goal.times is not None
        value, limit = ratio(ours, other), f"at most {goal.times:.3g} times its time"
        met = value <= goal.times
    cells = [case["name"], ours["name"], other["name"], f"{value:.3g}", limit]
    return f"| {' | '.join([*cells, 'met' if met else 'MISSED'])} |"


def main() -> None:
    """Print the table of a file."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python bench/documents/goals.py RESULTS.json")
    print("\n".join(table(json.loads(Path(sys.argv[1]).read_text()))))


if __name__ == "__main__":
    main()
