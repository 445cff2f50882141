"""Peak memory of distillation by the number of tokens: fastrl, TRL's chunks, eager torch.

    python bench/divergence_memory.py [--tokens 1024 4096 16384]

Resident memory above that before the first call, in a process of its own for each number: of loss
and gradients, those of the student's head and hidden states included.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

import torch
from bench_divergence import cases, teacher_inputs
from shapes import Linear

HIDDEN, VOCABULARY, BETA = 512, 32768, 1.0
OP = "divergence, reverse KL"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # kind and tokens of a process
    options = parser.parse_args()
    if options.one:
        print(_peak(options.one[0], int(options.one[1])))
        return
    print("| tokens | gradients, MB | fastrl | TRL chunked | eager |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for tokens in options.tokens:
        cells = []
        for kind in ("fastrl cpu", "peer", "eager"):
            command = [sys.executable, __file__, "--one", kind, str(tokens)]
            found = subprocess.run(command, capture_output=True, text=True, check=False)
            cells.append(found.stdout.strip() if found.returncode == 0 else "-")
        gradients = 4 * HIDDEN * (tokens + VOCABULARY) / 1e6
        print(f"| {tokens:,} | {gradients:.0f} | {' | '.join(cells)} |", flush=True)


def _peak(kind: str, tokens: int) -> str:
    shape = Linear("memory", 1, tokens, HIDDEN, VOCABULARY)
    case = next(x for x in cases("issue") if x.op == OP and x.dtype == torch.float32)
    run = next(provider.run for provider in case.providers if provider.kind == kind)
    inputs = teacher_inputs(Linear("inputs", 1, 8, HIDDEN, VOCABULARY), torch.float32, 0)
    run(inputs)  # loads what a first call loads
    del inputs
    inputs = _inputs(shape)
    before = _resident()
    held = run(inputs)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    del held
    return f"{(after - before) / 1e6:.0f}"


def _inputs(shape: Linear) -> dict[str, torch.Tensor]:
    """Return inputs that are made without the logits, whose memory would count."""
    rows = (shape.sequences, shape.tokens)
    states = [torch.randn(*rows, shape.hidden) for _ in range(2)]
    heads = [torch.randn(shape.vocab, shape.hidden) / shape.hidden**0.5 for _ in range(2)]
    return {
        "hidden": states[0],
        "weight": heads[0],
        "teacher_hidden": states[1],
        "teacher_weight": heads[1],
        "token_ids": torch.zeros(rows, dtype=torch.int64),
        "mask": torch.ones(rows),
    }


def _resident() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
