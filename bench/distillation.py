"""A small student learns from a teacher alone, or from the reward alone, by step.

    python bench/distillation.py [--steps 40 --seeds 0 1 2 --out-dir runs/distillation]

The teacher is the small new model of `make train`, which learns the embedded task by GRPO. The
students are half as wide. A seed draws their first weights; those of one seed begin after the
same warm start, and sample as many completions per step: one of each of 256 prompts for the
distillation, which compares nothing, 8 of each of 32 prompts for GRPO. Prints a table, and plots
the held-out reward and the agreement with the teacher to docs/distillation.png. Runs that are in
the directory already are not repeated, and one that was interrupted is continued.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from fastrl.train.checkpoint import seed_all
from fastrl.train.config import GrpoConfig
from fastrl.train.grpo import train
from fastrl.train.loading import character_tokenizer, small_model

ROOT = Path(__file__).parents[1]
PLOT = ROOT / "docs" / "distillation.png"
COMPLETIONS = 256
STUDENT = {"hidden_size": 64, "intermediate_size": 256}
KINDS = {
    "distillation": {"reward": ("none",), "group_size": 1, "prompts_per_step": COMPLETIONS},
    "GRPO": {"group_size": 8, "prompts_per_step": COMPLETIONS // 8},
}
#: Of a step, in the log: how often the most likely tokens of both are the same.
AGREEMENT = "teacher_agreement"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--teacher-steps", type=int, default=60)
    parser.add_argument("--warm-start-steps", type=int, default=400, help="of the students")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="of the students")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out-dir", type=Path, default=ROOT / "runs" / "distillation")
    parser.add_argument("--plot", type=Path, default=PLOT)
    options = parser.parse_args()
    began = time.monotonic()
    teacher = options.out_dir / "teacher"
    # all runs have the loop's seed 0: others would hold out prompts that the teacher was trained on
    of_teacher = run(teacher, steps=options.teacher_steps, eval_every=options.teacher_steps)
    runs: dict[str, list[list[dict]]] = {name: [] for name in KINDS}
    for seed in options.seeds:
        start = started(options, seed)
        for name, own in KINDS.items():
            settings = {"steps": options.steps, "learning_rate": options.learning_rate, **own}
            if name == "distillation":
                settings["teacher"] = str(teacher)
            settings |= {"model": start, "warm_start_steps": 0, "eval_every": 2, "minibatches": 2}
            runs[name].append(run(options.out_dir / f"{name}-{seed}", **settings))
    print(table(runs, of_teacher))
    print(f"in {(time.monotonic() - began) / 60:.1f} minutes")
    draw(runs, of_teacher, options.plot)


def run(out: Path, **settings: object) -> list[dict]:
    """The log of a run, which is trained or continued if need be."""
    resume = (out / "config.json").exists()
    train(GrpoConfig(out=str(out), resume=resume, save_every=20, **settings))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def started(options: argparse.Namespace, seed: int) -> str:
    """The directory of a student after its warm start."""
    new = options.out_dir / f"new-{seed}"
    if not new.exists():
        seed_all(seed)
        tokenizer = character_tokenizer()
        config = small_model(tokenizer).config
        for name, value in STUDENT.items():
            setattr(config, name, value)
        config.head_dim = STUDENT["hidden_size"] // config.num_attention_heads
        model = LlamaForCausalLM(config)
        for part in (model, tokenizer):
            part.save_pretrained(new)
    out, steps = options.out_dir / f"start-{seed}", options.warm_start_steps
    run(out, model=str(new), steps=1, warm_start_steps=steps, learning_rate=1e-9, seed=0)
    return str(out / "checkpoints" / "step-000000")


def table(runs: dict[str, list[list[dict]]], of_teacher: list[dict]) -> str:
    """Rows of the seeds' numbers, side by side."""
    lines = ["| learns from | held-out reward before | after | first step at 0.9 of the teacher |"]
    lines += ["| --- | --- | --- | --- |"]
    best = of_teacher[-1]["held_out_reward"]
    for name, of_seeds in runs.items():
        rewards = [curve(rows, "held_out_reward") for rows in of_seeds]
        reached = [next((s for s, r in of_run if r >= 0.9 * best), None) for of_run in rewards]
        before, after = (", ".join(f"{of[i][1]:.3f}" for of in rewards) for i in (0, -1))
        steps = ", ".join("none" if step is None else str(step) for step in reached)
        lines.append(f"| {name} | {before} | {after} | {steps} |")
    agreements = [curve(rows, AGREEMENT) for rows in runs["distillation"]]
    first, last = (", ".join(f"{of[i][1]:.3f}" for of in agreements) for i in (0, -1))
    divergences = [curve(rows, "divergence") for rows in runs["distillation"]]
    far, near = (", ".join(f"{of[i][1]:.3f}" for of in divergences) for i in (0, -1))
    lines += [f"\nteacher: {best:.3f}; agreement with it: {first} in step 1, {last} in the last"]
    return "\n".join([*lines, f"divergence from it: {far} in step 1, {near} in the last"])


def curve(rows: list[dict], key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if key in row]


def draw(runs: dict[str, list[list[dict]]], of_teacher: list[dict], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for (name, of_seeds), color in zip(runs.items(), ("tab:blue", "tab:orange"), strict=True):
        for number, rows in enumerate(of_seeds):
            label = name if number == 0 else None
            left.plot(*zip(*curve(rows, "held_out_reward"), strict=True), color=color, label=label)
            if name == "distillation":
                right.plot(*zip(*curve(rows, AGREEMENT), strict=True), color=color)
    left.axhline(of_teacher[-1]["held_out_reward"], color="gray", linestyle=":", label="teacher")
    left.set(xlabel="step", ylabel="held-out reward, greedy")
    right.set(xlabel="step", ylabel="agreement with the teacher")
    left.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    torch.set_num_threads(min(2, torch.get_num_threads()))
    main()
