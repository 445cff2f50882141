"""What replaying the tokens that a sampler kept changes: a run with top_p, memory, a prediction.

    python bench/kept_tokens.py [--steps 40 --top-p 0.9 --seeds 0 1 2]
    python bench/kept_tokens.py --memory
    python bench/kept_tokens.py --predict

The first trains the small new model on the embedded task with `--top_p`, once with the tokens that
the sampler kept and once, as most trainers do, with log-probabilities of the whole vocabulary. It
prints the mean |log ratio| of what was sampled, on policy, and plots it with the held-out reward
to docs/kept_tokens.png.

The prediction is for the loss with all gradients on an H200, in bfloat16: kept rows read K rows of
the head twice and K hidden states once, and write the gradient of the head; the rates and the full
head are those of linear_prediction.py with 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import linear_prediction
import torch
from bench_kept_tokens import kept_inputs
from bench_linear import fastrl_provider
from memory import _peak, _reset_peak
from shapes import Linear

from fastrl.train import grpo, packing
from fastrl.train.config import GrpoConfig

SHAPE = Linear("issue", 4, 256, 512, 32768)
COUNTS = (None, 8, 32, 128, 512)
PLOT = Path(__file__).parent.parent / "docs" / "kept_tokens.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--memory", action="store_true", help="peak memory beyond the gradients")
    parser.add_argument("--predict", action="store_true", help="times on an H200")
    parser.add_argument("--count", type=int, help="measure this number of tokens, here")
    options = parser.parse_args()
    if options.count is not None:
        print(json.dumps(_measured(options.count or None)))
    elif options.memory:
        _print_memory()
    elif options.predict:
        _print_predictions()
    else:
        _compare_runs(options.steps, options.top_p, options.seeds)


def _print_memory() -> None:
    print("| kept | peak beyond inputs and gradients, MB |")
    print("| --- | ---: |")
    for count in COUNTS:
        command = [sys.executable, __file__, "--count", str(count or 0)]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"| {count or 'all'} | {json.loads(found.stdout) / 1e6:.1f} |", flush=True)


def _measured(count: int | None) -> int:
    run = fastrl_provider("cpu").run
    tiny = Linear("warm-up", 2, 4, 16, 1000)
    run(_inputs(tiny, count))
    inputs = _inputs(SHAPE, count)
    before = _reset_peak()
    gradients = run(inputs)
    return _peak() - before - sum(x.nbytes for x in gradients)


def _inputs(shape: Linear, count: int | None) -> dict:
    inputs = kept_inputs(shape, torch.float32, 0, min(count or 1, shape.vocab // 4))
    return inputs if count else {name: x for name, x in inputs.items() if name != "kept"}


def _print_predictions(rows: int = 8192, width: int = 4096, vocabulary: int = 151936) -> None:
    rates = linear_prediction.Rates(bytes=4.3e12)
    chunk = linear_prediction.chunk_rows(width, vocabulary)
    full = linear_prediction.predicted(rows, width, vocabulary, chunk, 6.0, rates=rates)
    print(f"{rows} x {width} x {vocabulary}, bfloat16, on an H200; a prediction\n")
    print("| kept | ms, trained head | ms, frozen head |")
    print("| --- | ---: | ---: |")
    chunk = linear_prediction.chunk_rows(width, vocabulary, trained=False)
    frozen = linear_prediction.predicted(
        rows, width, vocabulary, chunk, 6.0, trained=False, rates=rates
    )
    print(f"| all | {full * 1e3:.1f} | {frozen * 1e3:.1f} |")
    for count in COUNTS[1:]:
        read = 2 * rows * count * width * 2  # dots and sums: rows of the head in bfloat16
        scattered = rows * count * width * 2  # hidden states, sorted by token
        touched = min(vocabulary, rows * count)
        # zeros, sums read and written where a token was kept, bfloat16 read and written
        gradient = vocabulary * width * (4 + 4 + 2) + touched * width * 8
        seconds = read / rates.bytes, (scattered + gradient) / rates.bytes
        print(f"| {count} | {sum(seconds) * 1e3:.1f} | {seconds[0] * 1e3:.1f} |")


def _compare_runs(steps: int, top_p: float, seeds: list[int]) -> None:
    runs = {True: [], False: []}
    print("| replay | seed | mean abs log ratio, step 1 | last step | held-out reward |")
    print("| --- | --- | ---: | ---: | ---: |")
    for seed in seeds:
        for replay in (True, False):
            rows = _train(steps, top_p, seed, replay=replay)
            runs[replay].append(rows)
            first, last = rows[1], rows[-1]
            print(
                f"| {'yes' if replay else 'no'} | {seed} | {first['log_ratio']:.2g} "
                f"| {last['log_ratio']:.2g} | {last['held_out_reward']:.3f} |",
                flush=True,
            )
    _plot(runs, top_p)


def _train(steps: int, top_p: float, seed: int, *, replay: bool) -> list[dict[str, float]]:
    """Return the log of a run, with the mean |log ratio| of what was sampled on policy."""
    found: list[list[float]] = []
    of_loop, begin = grpo.sampler_kl, grpo.MetricMeans

    def noted(logprobs: torch.Tensor, of_sampler: torch.Tensor) -> torch.Tensor:
        found[-1].append(float((logprobs.detach() - of_sampler).abs().mean()))
        return of_loop(logprobs, of_sampler)

    def begun() -> object:
        found.append([])
        return begin()

    with contextlib.ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.object(grpo, "sampler_kl", noted))
        stack.enter_context(mock.patch.object(grpo, "MetricMeans", begun))
        if not replay:
            stack.enter_context(mock.patch.object(packing, "_pack", _without_sets))
        config = {"steps": steps, "top_p": top_p, "seed": seed, "eval_every": 2}
        grpo.train(GrpoConfig(out=f"{out}/run", save_every=10**6, **config))
        lines = Path(out, "run", "metrics.jsonl").read_text().splitlines()
    rows = list(map(json.loads, lines))
    for row, ratios in zip(rows[1:], found, strict=True):
        row["log_ratio"] = ratios[0]  # of the first minibatch
    return rows


def _without_sets(*arguments: object) -> packing.PackedBatch:
    return _PACK(*arguments)._replace(kept=None)


_PACK = packing._pack


def _plot(runs: dict[bool, list[list[dict[str, float]]]], top_p: float) -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for replay, color in ((True, "tab:blue"), (False, "tab:orange")):
        for number, rows in enumerate(runs[replay]):
            label = f"{'with' if replay else 'without'} the tokens kept" if number == 0 else None
            evaluated = [row for row in rows if "held_out_reward" in row]
            steps = [row["step"] for row in evaluated]
            rewards = [row["held_out_reward"] for row in evaluated]
            left.plot(steps, rewards, color=color, label=label)
            trained = [row for row in rows if "log_ratio" in row]
            ratios = [row["log_ratio"] for row in trained]
            right.plot([row["step"] for row in trained], ratios, color=color, label=label)
    left.set(xlabel="step", ylabel="held-out reward, greedy", title=f"top_p {top_p}")
    right.set(xlabel="step", ylabel="mean |log ratio| on policy", yscale="log")
    left.legend()
    figure.savefig(PLOT, dpi=110)


if __name__ == "__main__":
    main()
