"""Score centering with a sampler that is wrong on purpose, three seeds each.

    OMP_NUM_THREADS=1 python bench/studies/score_centering.py --jobs 2

`fastrl grpo` with `--objective reinforce` trains the small model on short sums. A copy of its
weights samples: rounded to a few bits (symmetric, a scale for each row of each matrix), or those of
some steps before. Each fault is trained with and without `--score_centering`, and with and without
a truncated importance weight (`--rollout_correction truncate`). Beside them is a sampler without a
fault. All runs of a seed begin after the same warm start, with the same prompts.

The rules were fixed before these runs. Of 2e-4, 5e-4 and 1e-3, the learning rate is that at which a
sampler without a fault learned best, with another seed. A fault is worse than planned (8 bits, 8
steps) if the mean KL from sampler to trainer would not reach 0.01 nats per token without centering:
8 bits had 5e-5, so there are 4. The final reward is the mean of the last 5 evaluations. KL and
gradient norm (before clipping) are means over all steps, of the tokens that have an advantage.

Writes curves, settings and machine to the JSON that `make pictures` draws, and prints
a table: mean and standard error over seeds. Finished runs are not repeated. All of them took 35
minutes on two busy cores.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import statistics
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.bench.machine import machine
from fastrl.train import transformers_sampler
from fastrl.train.config import GrpoConfig
from fastrl.train.grpo import train
from fastrl.train.rollout import Completion

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "score-centering-2026-11-29.json"
KEYS = {"held_out_reward": 4, "reward": 4, "kl_sampler": 6, "grad_norm": 4}  # digits
EVERY = 10  # steps between evaluations; of what is logged at each step, the mean over them
LAST = 5  # evaluations
TOP = 16  # of 98 tokens
SETTINGS = {"objective": "reinforce", "minibatches": 1, "prompts_per_step": 32, "group_size": 8}
SETTINGS |= {"learning_rate": 2e-4, "schedule": "constant", "eval_every": EVERY}
SETTINGS |= {"save_every": 10**6, "save_minutes": None, "device": "cpu"}
#: Bits of the weights that sample, or steps by which they are older.
FAULTS = {"no fault": {}, "4 bits": {"bits": 4}, "8 steps old": {"steps": 8}}


class Case(NamedTuple):
    """A run."""

    fault: str
    seed: int
    truncated: bool
    centered: bool

    @property
    def method(self) -> str:
        parts = ["truncated weight"] * self.truncated + ["score centering"] * self.centered
        return " + ".join(parts) or "plain"


class WrongEngine(transformers_sampler.TransformersEngine):
    """`generate` with a copy of the weights that has a fault; evaluations have the weights."""

    fault: dict[str, int]

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self._past: deque[list[Tensor]] = deque(maxlen=1 + self.fault.get("steps", 0))

    @torch.no_grad()
    def complete(self, prompts: list[list[int]], *, greedy: bool) -> list[Completion]:
        """Sample once a step."""
        if greedy:
            return super().complete(prompts, greedy=True)
        weights = [*self._model.parameters()]
        self._past.append(own := [weight.clone() for weight in weights])
        bits = self.fault.get("bits")
        try:
            for weight, old in zip(weights, self._past[0], strict=True):
                weight.copy_(old if bits is None or old.dim() < 2 else rounded(old, bits))
            return super().complete(prompts, greedy=False)
        finally:
            for weight, right in zip(weights, own, strict=True):
                weight.copy_(right)


def rounded(matrix: Tensor, bits: int) -> Tensor:
    """Return the nearest of 2 ** bits - 1 multiples of a scale, whose largest is the row's."""
    most = 2 ** (bits - 1) - 1
    scale = matrix.abs().amax(1, keepdim=True) / most
    return (matrix / scale).round().nan_to_num() * scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--warm-start-steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out-dir", type=Path, default=ROOT / "runs" / "score-centering")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    out, settings = arguments.out_dir.resolve(), SETTINGS | {"steps": arguments.steps}
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        seeds, warm = arguments.seeds, arguments.warm_start_steps
        models = pool.map(started, seeds, [warm] * len(seeds), [out / f"start-{s}" for s in seeds])
        begun = dict(zip(seeds, models, strict=True))
        cases = [
            Case(fault, seed, *how)
            for seed in seeds
            for fault in FAULTS
            for how in (product((False, True), repeat=2) if FAULTS[fault] else [(False, False)])
        ]
        runs = [pool.submit(trained, case, begun[case.seed], settings, out) for case in cases]
        curves: dict[str, dict] = {fault: {} for fault in FAULTS}
        for case, run in zip(cases, runs, strict=True):
            curves[case.fault].setdefault(case.method, {})[str(case.seed)] = run.result()
    study = {"date": f"{datetime.now():%Y-%m-%d}", "machine": machine(torch.device("cpu"))}
    study["command"] = shlex.join(["python", "bench/studies/score_centering.py", *sys.argv[1:]])
    study |= {"settings": settings | {"score_centering": TOP}, "faults": FAULTS, "curves": curves}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(study))
    print(table(study))
    print(f"curves: {arguments.results}")


def started(seed: int, warm_start_steps: int, out: Path) -> str:
    """The directory of a new model after its warm start, before its first step."""
    model = out / "checkpoints" / "step-000000"
    if not model.exists():
        train(GrpoConfig(out=str(out), seed=seed, steps=1, warm_start_steps=warm_start_steps))
    return str(model)


def trained(case: Case, model: str, settings: dict, out: Path) -> dict[str, list]:
    """What a run logged, by name as pairs of step and value; it is trained if need be."""
    run = out / f"{case.fault}-{case.method}-{case.seed}".replace(" ", "-")
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not rows or rows[-1]["step"] < settings["steps"]:
        shutil.rmtree(run, ignore_errors=True)
        WrongEngine.fault = FAULTS[case.fault]
        transformers_sampler.TransformersEngine = WrongEngine
        own = {"out": str(run), "model": model, "seed": case.seed, "warm_start_steps": 0}
        own["rollout_correction"] = "truncate" if case.truncated else "none"
        own["score_centering"] = TOP if case.centered else None
        train(GrpoConfig(**settings, **own))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    found: dict[str, list] = {}
    for key, digits in KEYS.items():
        values: dict[int, list[float]] = {}
        for row in rows:
            if key in row:
                values.setdefault(-(-row["step"] // EVERY) * EVERY, []).append(row[key])
        found[key] = [(at, round(statistics.mean(each), digits)) for at, each in values.items()]
    return found


def numbers(seeds: dict[str, dict]) -> dict[str, tuple[float, float]]:
    """Mean and standard error over seeds: final held-out reward, mean KL, mean gradient norm."""
    found = {}
    for key in KEYS:
        last = LAST if "reward" in key else 0
        ends = [[value for _, value in run[key][-last:]] for run in seeds.values()]
        means = [statistics.mean(values or [math.nan]) for values in ends]  # nothing was learned
        error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
        found[key] = statistics.mean(means), error
    return found


def table(study: dict) -> str:
    lines = ["| sampler | method | " + " | ".join(KEYS) + " |", "| --- " * (2 + len(KEYS)) + "|"]
    for fault, methods in study["curves"].items():
        for method, seeds in methods.items():
            cells = [f"{mean:.3g} ± {error:.2g}" for mean, error in numbers(seeds).values()]
            lines.append(f"| {fault} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
