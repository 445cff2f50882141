"""Peak memory and time of loss and gradients from hidden states, against torch and TRL.

    python bench/linear_table.py [--rows 1024 4096 16384 65536 --hidden 256 --vocab 32768]

Each cell is a separate process: make the inputs, warm up with a small call, reset the kernel's
high-water mark, time some calls and keep the fastest, read the mark. Memory is what the calls take
beyond their inputs, gradients included, independent of any allocator's statistics. A provider
whose logits alone would take a third of the machine's memory is not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from bench_linear import _leaves, eager, linear_inputs, trl_loss
from memory import _peak, _reset_peak
from shapes import Linear

import fastrl

PROVIDERS = ("fastrl", "eager", "torch.compile", "TRL chunked")
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
Loss = Callable[..., torch.Tensor]


def main() -> None:
    options = _options()
    if options.provider:
        print(json.dumps(_measure(options, options.provider, options.rows[0])))
        return
    providers = [p for p in PROVIDERS if p != "TRL chunked" or importlib.util.find_spec("trl")]
    print(f"loss and gradients, H = {options.hidden}, V = {options.vocab}, {options.dtype}\n")
    print("| rows | " + " | ".join(f"{name}: MB, s" for name in providers) + " |")
    print("| ---: |" + " ---: |" * len(providers))
    for rows in options.rows:
        cells = [_cell(options, name, rows) for name in providers]
        print(f"| {rows} | " + " | ".join(cells) + " |", flush=True)


def _cell(options: argparse.Namespace, provider: str, rows: int) -> str:
    whole = provider in ("eager", "torch.compile")
    if whole and rows * options.vocab * 4 * 3 > MEMORY:
        return "does not fit"
    command = [sys.executable, __file__, "--provider", provider, "--rows", str(rows)]
    for name in ("hidden", "vocab", "dtype"):
        command += [f"--{name}", str(getattr(options, name))]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        return (child.stderr.strip().splitlines() or ["no message"])[-1][:60]
    found = json.loads(child.stdout)
    return f"{found['bytes'] / 1e6:.0f}, {found['seconds']:.2f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--provider", choices=PROVIDERS, help="measure this one, here")
    return parser.parse_args()


def loss_of(provider: str) -> Loss:
    """The clipped loss as a function (hidden, weight, token_ids, advantages, old, mask)."""
    if provider == "fastrl":
        objective = fastrl.Objective(aggregation="token-mean")

        def run(hidden, weight, token_ids, advantages, old_logprobs, mask):
            return fastrl.linear_policy_loss(
                hidden,
                weight,
                token_ids,
                advantages[:, 0],
                mask,
                old_logprobs=old_logprobs,
                objective=objective,
            ).loss

        return run
    if provider == "TRL chunked":
        return trl_loss
    whole = torch.compile(eager) if provider == "torch.compile" else eager
    return lambda *inputs: whole(*inputs) / inputs[-1].sum()


def _measure(options: argparse.Namespace, provider: str, rows: int) -> dict[str, float]:
    dtype, loss = getattr(torch, options.dtype), loss_of(provider)

    def step(shape: Linear, calls: int) -> tuple[float, int]:
        inputs = linear_inputs(shape, dtype, seed=0)
        rest = [inputs[n] for n in ("token_ids", "advantages", "old_logprobs", "mask")]
        before, seconds = _reset_peak(), []
        for _ in range(calls):
            leaves = _leaves(inputs)
            started = time.perf_counter()
            torch.autograd.grad(loss(*leaves, *rest), leaves)
            seconds.append(time.perf_counter() - started)
        return min(seconds), _peak() - before

    step(Linear("warm-up", 2, 8, options.hidden, 512), 2)
    calls = 3 if rows <= 16384 else 1
    shape = Linear("measured", rows // 256, 256, options.hidden, options.vocab)
    seconds, taken = step(shape, calls)
    return {"seconds": seconds, "bytes": taken}


if __name__ == "__main__":
    main()
