"""What score centering costs: time and memory of a loss from hidden states, with and without it.

    python bench/studies/score_centering_cost.py

1,024 tokens, H 512, V 32,768, float32 and K = 20, loss and gradients, on a CPU. The two take turns;
the time is the median ratio of paired calls, the memory the peak of one call in a fresh process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import torch

import fastrl
from fastrl.bench.memory import Peak

ROWS, WIDTH, VOCABULARY, K = 1024, 512, 32768, 20


def call(
    centering: bool, rows: int = ROWS, vocabulary: int = VOCABULARY
) -> tuple[float, int | None]:
    """Compute the loss and its gradients; return the seconds and the bytes."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, WIDTH, requires_grad=True)
    weight = (torch.randn(vocabulary, WIDTH) / WIDTH**0.5).requires_grad_()
    ids, ones = torch.randint(vocabulary, (rows,)), torch.ones(rows)
    top = torch.randint(vocabulary // K, (rows, K)) + torch.arange(K) * (vocabulary // K)
    sampler = fastrl.TopKLogprobs(top, torch.full((rows, K), -4.0))
    objective = fastrl.Objective.preset("reinforce", score_centering=centering)
    top_k = sampler if centering else None
    start = time.perf_counter()
    with Peak(torch.device("cpu")) as peak:
        fastrl.linear_policy_loss(
            hidden, weight, ids, torch.randn(rows), ones, objective=objective, rollout_top_k=top_k
        ).loss.backward()
    return time.perf_counter() - start, peak.bytes


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15, help="pairs of calls")
    parser.add_argument("--memory", choices=("with", "without"), help="one call in this process")
    options = parser.parse_args()
    if options.memory:
        call(options.memory == "with", rows=8, vocabulary=256)  # loads the kernels
        print(call(options.memory == "with")[1])
        return
    pairs = [(call(False)[0], call(True)[0]) for _ in range(options.turns + 1)][1:]
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"time {ratio:.3f}: {min(a for a, _ in pairs):.3f} s without, at best")
    command = [sys.executable, __file__, "--memory"]
    without, with_it = (
        int(subprocess.run([*command, name], capture_output=True, check=True, text=True).stdout)
        for name in ("without", "with")
    )
    print(f"memory {with_it / without:.3f}: {without / 2**20:.0f} MiB without")


if __name__ == "__main__":
    main()
