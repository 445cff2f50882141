"""The predicted time of fastrl's kernels on a GPU, beside the measured one.

    python bench/gpu_cost/predictions.py                # for an H100, before anything is measured
    python bench/gpu_cost/predictions.py results.json   # of `fastrl bench` on a GPU

Every kernel on logits is bound by memory (`make targets`), so its prediction is the bytes that it
moves over the copy rate, which a run measures first: per active logit of s bytes

    log-probability and entropy              s
    their gradients                          2 s
    loss and gradient, CUDA                  2 s      a row waits in shared memory
    loss and gradient, Triton                2 to 3 s by how much of the second reading is in cache

and s of each logit of a masked row that has a gradient to zero: the bytes that a case counts, and
what is read again. The share of a second reading that comes from memory is what the rows in flight,
two per multiprocessor, exceed the cache by. Linear forms are linear_prediction.py with the rates of
this machine, the bytes per logit of a chunk being 6 for CUDA and 6 to 10 for Triton. Operators on
tokens take per token

    GAE                                      17 bytes; Triton 26, in two sweeps, of long sequences
    policy loss and gradient, token level    14, the mask being counted first
    the same, sequence level                 32, in three sweeps, by one program per sequence
    group advantages                         17, and 25 with ids

at the copy rate, of which a multiprocessor alone has at most twice its share. What fits into the
cache in all is read from there the second time. Cases bound by launches are compared with the time
of their kernels alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from linear_prediction import H100, Rates, chunk_rows, chunk_seconds, predicted

from fastrl.bench.case import BACKWARD, BOTH, FORWARD
from fastrl.bench.cases import SELECTIONS, cases
from fastrl.bench.report import Results, Row, median

RESIDENT = 2  # rows in flight on a multiprocessor
APART = 0.2  # of the prediction: a difference with a cause that has to be found
GAE_CHUNK = 2048  # tokens of a program of Triton's: longer sequences take two launches
ALONE = 2.0  # share of the copy rate, in its own shares, that a multiprocessor has alone
#: What a run would measure of an H100, as far as the models need it.
MACHINE = {
    "copy GB/s": H100.bytes / 1e9,
    "bfloat16 GEMM TFLOP/s": H100.flops / 1e12,
    "multiprocessors": 132,
    "cache MB": 52.4,
}
Machine = dict[str, float]


def table(found: Results) -> list[str]:
    """Return the table of what was predicted and what was measured."""
    lines = ["| case | provider | predicted | measured | measured / predicted | |"]
    lines += ["| --- | --- | ---: | ---: | ---: | --- |"]
    for case in filter(has_prediction, found["cases"]):
        for provider, expected, took in _pairs(case, found["ceilings"]):
            ratio = took / expected
            apart = "apart" if abs(ratio - 1) > APART else ""
            times = f"{_in_words(expected)} | {_in_words(took)} | {ratio:.2f} | {apart}"
            lines.append(f"| {case['name']} | {provider} | {times} |")
    return lines


def has_prediction(case: Row) -> bool:
    """Return whether a model is there.

    There is none of teachers, of kept tokens, nor of a loss without its gradient.
    """
    computed_forward = case["op"].endswith("policy_loss") and case["step"] == FORWARD
    other_work = case["op"].endswith("divergence") or case["variant"].endswith(("teacher", "kept"))
    return not other_work and not computed_forward


def _pairs(case: Row, machine: Machine) -> Iterator[tuple[str, float, float]]:
    """Yield each kernel backend of fastrl with its predicted and its measured seconds."""
    for row in case["providers"]:
        if row["seconds"] and row["name"] in ("fastrl triton", "fastrl cuda"):
            took = median(row) if row["kernels"] is None else row["kernels"]
            yield row["name"], seconds(case, row["name"], machine), took


def _in_words(time: float) -> str:
    return f"{time * 1e3:.3f} ms" if time >= 1e-3 else f"{time * 1e6:.1f} us"


def seconds(case: Row, provider: str, machine: Machine) -> float:
    """Return the predicted seconds of a call, without its launches."""
    sizes = case["shape"]
    if case["op"].startswith("linear_"):
        return _linear(case, provider, machine, **sizes)
    rate, moved = machine["copy GB/s"] * 1e9, float(case["bytes_moved"])
    if case["op"] == "logits_policy_loss" and "triton" in provider:
        row = sizes["vocabulary"] * getattr(torch, case["dtype"]).itemsize
        active = sizes["rows"] * (0.5 if "masked" in case["variant"] else 1.0)
        moved += active * row * second_reading(machine, sizes["rows"], row)
    elif case["op"] == "gae" and "triton" in provider and sizes["tokens"] > GAE_CHUNK:
        second_sweep = 9 * sizes["sequences"] * sizes["tokens"]
        moved += max(0.0, second_sweep - machine["cache MB"] * 1e6)
    elif case["op"] == "policy_loss":
        sequences = "sequence level" in case["variant"]
        # the mask is counted first; sequences take two more sweeps
        moved += (1 + 2 * 9 * sequences) * sizes["sequences"] * sizes["tokens"]
        if sequences:
            rate *= min(1.0, ALONE * sizes["sequences"] / machine["multiprocessors"])
    return moved / rate


def second_reading(machine: Machine, rows: int, row_bytes: int) -> float:
    """Return the share of a second sweep over rows that comes from memory, not from the cache."""
    in_flight = min(rows, RESIDENT * int(machine["multiprocessors"])) * row_bytes
    return max(0.0, 1 - machine["cache MB"] * 1e6 / in_flight)


def _linear(
    case: Row, provider: str, machine: Machine, rows: int, hidden: int, vocabulary: int
) -> float:
    rates = Rates(machine["bfloat16 GEMM TFLOP/s"] * 1e12, machine["copy GB/s"] * 1e9)
    trained = "frozen" not in case["variant"]
    active = rows // 2 if "masked" in case["variant"] else rows
    chunk = chunk_rows(hidden, vocabulary, trained=trained)
    again = second_reading(machine, min(active, chunk), 4 * vocabulary)
    moved = 6 + (4 * again if "triton" in provider else 0.0)
    if case["op"] == "linear_policy_loss":
        return predicted(active, hidden, vocabulary, chunk, moved, trained=trained, rates=rates)
    projected = chunk_seconds(active, hidden, vocabulary, first=True, rates=rates).projection
    scored = projected + 4 * active * vocabulary / rates.bytes
    # the backward projects again, reads the logits once, and writes their gradient
    gradients = predicted(active, hidden, vocabulary, chunk, 6, rates=rates)
    return {FORWARD: scored, BACKWARD: gradients, BOTH: scored + gradients}[case["step"]]


def _of_h100() -> list[str]:
    lines = ["| case | Triton | CUDA |", "| --- | ---: | ---: |"]
    device = torch.device("cuda")
    for case in cases(SELECTIONS["cuda"], (FORWARD, BOTH), device, ("triton", "cuda"), ()):
        kept = case.described()
        if not has_prediction(kept):
            continue
        times = [seconds(kept, f"fastrl {backend}", MACHINE) for backend in ("triton", "cuda")]
        lines.append(f"| {case.name} | {' | '.join(map(_in_words, times))} |")
    return lines


def main() -> None:
    """Print the table of a file, or of an H100."""
    if len(sys.argv) > 1:
        print("\n".join(table(json.loads(Path(sys.argv[1]).read_text()))))
    else:
        print(f"{MACHINE}\n")
        print("\n".join(_of_h100()))


if __name__ == "__main__":
    main()
