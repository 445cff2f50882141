"""Held-out reward by step of small trainings, ten seeds each.

GRPO, PPO and distillation begin with the same students, half as wide as the model of `make train`;
the teacher is that model, trained by GRPO. A seed draws the first weights, and its runs begin after
the same warm start. A step samples 256 completions: one of each prompt, or 8 where they are
compared. Writes the curves, settings and machine to the JSON that `make pictures` draws, and prints
a table. Finished runs are not repeated, and interrupted ones are continued.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from datetime import datetime
from pathlib import Path

import torch

from fastrl.bench.machine import machine

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "curves-2026-11-28.json"
HEAD = "| --- | --- | --- | --- |"
COMPLETIONS = 256
ALONE = {"prompts_per_step": COMPLETIONS}
GROUPS = {"prompts_per_step": COMPLETIONS // 8, "group_size": 8}
KEYS = ("reward", "held_out_reward", "teacher_agreement", "divergence")
STUDENT = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
TEACHER = {"steps": 60, "eval_every": 60, "seed": 0}
# always the loop's seed 0: another would hold out prompts that the teacher was trained on
SETTINGS = {"steps": 40, "learning_rate": 2e-4, "minibatches": 2, "seed": 0}
CURVES = {
    "GRPO": ("grpo", GROUPS),
    "PPO": ("ppo", ALONE),
    "distillation": ("grpo", ALONE | {"group_size": 1, "reward": ["none"]}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(10)])
    parser.add_argument("--out-dir", type=Path, default=ROOT / "runs" / "curves")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    given = {k: v for k in ("steps", "learning_rate") if (v := getattr(arguments, k))}
    study = measured(SETTINGS | given, arguments.seeds, arguments.out_dir.resolve())
    arguments.results.write_text(json.dumps({"methods": study}))
    print(table(study))
    print(f"curves: {arguments.results}")


def measured(settings: dict, seeds: list[int], out: Path) -> dict:
    """The curves by method and seed, and what they were made with."""
    curves: dict[str, dict] = {method: {} for method in CURVES}
    teacher = trained("grpo", out / "teacher", **TEACHER)
    for seed in seeds:
        common = {**settings, "eval_every": 2, "save_every": 20}
        common["model"] = started(seed, out / f"start-{seed}", {**common, **ALONE})
        for method, (loop, own) in CURVES.items():
            given = {"teacher": str(out / "teacher")} if method == "distillation" else {}
            run = out / f"{method}-{seed}"
            curves[method][seed] = trained(loop, run, **common, **own, **given, warm_start_steps=0)
    made = {"title": "short sums, students half as wide", "date": f"{datetime.now():%Y-%m-%d}"}
    made["command"] = shlex.join(["python", "bench/studies/curves.py", *sys.argv[1:]])
    made["machine"] = machine(torch.device("cpu"))
    return {**made, "settings": settings, "teacher": teacher, "curves": curves}


def started(seed: int, out: Path, settings: dict) -> str:
    """The directory of a student after its warm start, before its first step."""
    if not (model := out / "new").exists():
        from transformers import LlamaForCausalLM

        from fastrl.train.checkpoint import seed_all
        from fastrl.train.loading import character_tokenizer, small_model

        seed_all(seed)
        tokenizer = character_tokenizer()
        config = small_model(tokenizer).config
        config.update(STUDENT)
        for part in (LlamaForCausalLM(config), tokenizer):
            part.save_pretrained(model)
    first = {"model": str(model), "warm_start_steps": 400, "steps": 1, "advantage": "reward"}
    trained("ppo", out / "run", **settings | first)
    return str(out / "run" / "checkpoints" / "step-000000")


def trained(loop: str, out: Path, **settings: object) -> dict[str, list]:
    """What a run logged, by name as pairs of step and value; it is trained if need be."""
    from fastrl.train import config, grpo, ppo

    rows = logged(out)
    if not rows or rows[-1]["step"] < settings["steps"]:
        kind = {"grpo": config.GrpoConfig, "ppo": config.PpoConfig}[loop]
        resume = (out / "config.json").exists()
        {"grpo": grpo.train, "ppo": ppo.train}[loop](kind(out=str(out), resume=resume, **settings))
        rows = logged(out)
        if rows[-1]["step"] < settings["steps"]:
            raise KeyboardInterrupt  # the loop saved the run and returned
    pairs = {key: [(row["step"], round(row[key], 4)) for row in rows if key in row] for key in KEYS}
    return {key: values for key, values in pairs.items() if values}


def logged(out: Path) -> list[dict]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(study: dict) -> str:
    lines = ["| method | held-out reward before | after | ever above 0.9 |", HEAD]
    for method, seeds in study["curves"].items():
        rewards = [[value for _, value in run["held_out_reward"]] for run in seeds.values()]
        ends = (spread([run[i] for run in rewards]) for i in (0, -1))
        above = sum(max(run) > 0.9 for run in rewards)
        lines.append(f"| {method} | {' | '.join(ends)} | {above} of {len(rewards)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """The median, and the lowest and the highest value."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
