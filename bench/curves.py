"""Held-out reward by step of small trainings, three seeds each.

    python bench/curves.py              # GRPO, PPO and distillation of the same students
    python bench/curves.py advantages   # PPO's four estimates of the advantage

Students are half as wide as the model of `make train`; the teacher is that model, trained by GRPO.
A seed draws the first weights, and its runs begin after the same warm start. A step samples 256
completions: one of each prompt, or 8 where they are compared. Adds the curves, settings and machine
to the JSON that `python bench/pictures.py` draws, and prints a table. Finished runs are not
repeated, and interrupted ones are continued.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from datetime import datetime
from pathlib import Path

import torch

from fastrl.bench.machine import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "curves-2026-11-26.json"
HEAD = "| --- | --- | --- | --- |"
COMPLETIONS = 256
ALONE = {"prompts_per_step": COMPLETIONS}
GROUPS = {"prompts_per_step": COMPLETIONS // 8, "group_size": 8}
KEYS = ("reward", "held_out_reward", "teacher_agreement", "divergence")
STUDENT = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
TEACHER = {"steps": 60, "eval_every": 60, "seed": 0}
STUDIES = {
    "methods": {
        "title": "short sums, students half as wide",
        # always the loop's seed 0: another would hold out prompts that the teacher was trained on
        "settings": {"steps": 40, "learning_rate": 2e-4, "minibatches": 2, "seed": 0},
        "curves": {
            "GRPO": ("grpo", GROUPS),
            "PPO": ("ppo", ALONE),
            "distillation": ("grpo", ALONE | {"group_size": 1, "reward": ["none"]}),
        },
    },
    "advantages": {
        "title": "long additions",
        "settings": {
            "steps": 24,
            "learning_rate": 1e-4,
            "minibatches": 1,
            "schedule": "constant",
            "prompts": ["long_addition"],
            "max_new_tokens": 192,
            "temperature": 0.6,
            "reward": ["fastrl.train.long_addition:right_sum"],
        },
        "curves": {
            "plain reward": ("ppo", ALONE | {"advantage": "reward"}),
            "reward minus value": ("ppo", ALONE | {"advantage": "value"}),
            "GAE": ("ppo", ALONE | {"advantage": "gae"}),
            "group": ("ppo", GROUPS | {"advantage": "group"}),
        },
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study", nargs="?", choices=STUDIES, default="methods")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out-dir", type=Path, default=ROOT / "runs" / "curves")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    settings = dict(STUDIES[arguments.study]["settings"])
    settings |= {k: v for k in ("steps", "learning_rate") if (v := getattr(arguments, k))}
    study = measured(arguments.study, settings, arguments.seeds, arguments.out_dir.resolve())
    path = arguments.results
    results = json.loads(path.read_text()) if path.exists() else {}
    results[arguments.study] = study
    text = json.dumps(results, indent=1)
    path.write_text(re.sub(r"\n *(?=[\[\]\d])", " ", text) + "\n")  # a list in a line
    print(table(study))
    print(f"curves: {path}")


def measured(name: str, settings: dict, seeds: list[int], out: Path) -> dict:
    """The curves of a study, by method and seed, and what they were made with."""
    curves: dict[str, dict] = {method: {} for method in STUDIES[name]["curves"]}
    teacher = trained("grpo", out / "teacher", **TEACHER) if name == "methods" else {}
    for seed in seeds:
        common = {"seed": seed, **settings, "eval_every": 2, "save_every": 20}
        common["model"] = started(name, out / f"{name}-start-{seed}", {**common, **ALONE})
        for method, (loop, own) in STUDIES[name]["curves"].items():
            given = {"teacher": str(out / "teacher")} if method == "distillation" else {}
            run = out / f"{name}-{method.replace(' ', '-')}-{seed}"
            curves[method][seed] = trained(loop, run, **common, **own, **given, warm_start_steps=0)
    made = {"title": STUDIES[name]["title"], "date": f"{datetime.now():%Y-%m-%d}"}
    made["command"] = shlex.join(["python", "bench/curves.py", *sys.argv[1:]])
    made["machine"] = machine(torch.device("cpu"))
    return {**made, "settings": settings, "teacher": teacher, "curves": curves}


def started(name: str, out: Path, settings: dict) -> str:
    """The directory of a model after its warm start, before its first step."""
    if name == "methods" and not (model := out / "new").exists():
        from transformers import LlamaForCausalLM

        from fastrl.train.checkpoint import seed_all
        from fastrl.train.loading import character_tokenizer, small_model

        seed_all(int(out.name.rpartition("-")[2]))
        tokenizer = character_tokenizer()
        config = small_model(tokenizer).config
        config.update(STUDENT)
        for part in (LlamaForCausalLM(config), tokenizer):
            part.save_pretrained(model)
    if name == "methods":
        settings |= {"model": str(model), "warm_start_steps": 400}
    trained("ppo", out / "run", **settings | {"steps": 1, "advantage": "reward"})
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
    lines = ["| method | held-out reward before | after | first step above 0.9 |", HEAD]
    for method, seeds in study["curves"].items():
        rewards = [run["held_out_reward"] for run in seeds.values()]
        first = [next((str(s) for s, value in run if value > 0.9), "none") for run in rewards]
        ends = (", ".join(f"{run[i][1]:.3f}" for run in rewards) for i in (0, -1))
        lines.append(f"| {method} | {' | '.join(ends)} | {', '.join(first)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
