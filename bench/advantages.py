"""Four estimates of the advantage side by side: ``python bench/advantages.py``.

Trains the small model on long additions by ``fastrl.train.ppo`` with each ``--advantage``, for
three seeds, with 256 completions of 180 tokens per step (of 256 prompts; for the groups, 8 of 32).
The runs of a seed begin with the same warm start. Writes the plot of the held-out reward to
``docs/advantages.png`` and prints a table. Runs that are in the directory already are not repeated,
and one that was interrupted is continued.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
ESTIMATES = {
    "reward": ("plain reward", []),
    "value": ("reward minus value", []),
    "gae": ("GAE", []),
    "group": ("group", ["--group_size", "8", "--prompts_per_step", "32"]),
}
TASK = shlex.split(
    "--prompts long_addition --reward fastrl.train.long_addition:right_sum --prompts_per_step 256 "
    "--minibatches 1 --max_new_tokens 192 --temperature 0.6 --learning_rate 1e-4 "
    "--schedule constant"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out_dir", type=Path, default=ROOT / "runs" / "estimates")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "advantages.png")
    parser.add_argument("options", nargs="*", help="further options of fastrl.train.ppo, after --")
    arguments = parser.parse_args()
    arguments.out_dir = arguments.out_dir.resolve()
    curves = {
        name: [rewards(name, seed, arguments) for seed in arguments.seeds] for name in ESTIMATES
    }
    print(table(curves))
    draw(curves, arguments.plot)
    print(f"plot: {arguments.plot}")


def rewards(name, seed, arguments):
    """The held-out reward after each evaluated step of a run, which is trained if need be."""
    started = train(arguments.out_dir / f"start-{seed}", seed, 1, arguments.options)
    model = started / "checkpoints" / "step-000000"  # after the warm start
    options = ["--model", str(model), "--warm_start_steps", "0", "--advantage", name]
    options += [*ESTIMATES[name][1], "--eval_every", "2", *arguments.options]
    run = arguments.out_dir / f"{name}-{seed}"
    return _logged(train(run, seed, arguments.steps, options))


def train(run, seed, steps, options):
    """Train in the directory ``run``, unless that is done already; returns it."""
    if steps not in _logged(run):
        command = [sys.executable, "-m", "fastrl.train.ppo", "--out", str(run)]
        command += ["--steps", str(steps), "--seed", str(seed)]
        command += [*TASK, *options]
        command += ["--resume"] if (run / "config.json").exists() else []
        subprocess.run(command, check=True, cwd=ROOT)
    return run


def _logged(run):
    path = run / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {row["step"]: row["held_out_reward"] for row in rows if "held_out_reward" in row}


def table(curves):
    lines = [
        "| advantage | held-out reward, each seed | first step above 0.9 |",
        "| --- | --- | --- |",
    ]
    for name, runs in curves.items():
        last = ", ".join(f"{run[max(run)]:.3f}" for run in runs)
        first = (next((step for step, value in run.items() if value > 0.9), None) for run in runs)
        above = ", ".join("-" if step is None else str(step) for step in first)
        lines.append(f"| {ESTIMATES[name][0]} | {last} | {above} |")
    return "\n".join(lines)


def draw(curves, path):
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, runs in curves.items():
        steps = sorted(set.intersection(*map(set, runs)))
        values = [[run[step] for run in runs] for step in steps]
        (line,) = axes.plot(steps, [statistics.mean(v) for v in values], label=ESTIMATES[name][0])
        low, high = ([end(v) for v in values] for end in (min, max))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    seeds = len(next(iter(curves.values())))
    axes.set(xlabel="step, of 256 completions", ylabel="held-out reward, greedy")
    axes.set_title(f"mean and range of {seeds} seeds", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
