"""The predicted time of fastrl's kernels on a GPU, beside the measured one.

    python bench/gpu_cost/predictions.py                # for an H100, before anything is measured
    python bench/gpu_cost/predictions.py results.json   # of `fastrl bench` on a GPU
    python bench/gpu_cost/predictions.py --chunks 8192 4096 128256    # rows, hidden, vocabulary

Every kernel on logits is bound by memory (`make targets`), so its prediction is the bytes that it
moves over the copy rate, which a run measures first: per active logit of s bytes

    log-probability and entropy              s
    their gradients                          2 s
    loss and gradient, CUDA                  2 s      a row waits in shared memory
    loss and gradient, Triton                2 to 3 s by how much of the second reading is in cache

and s of each logit of a masked row that has a gradient to zero: the bytes that a case counts, and
what is read again. The share of a second reading that comes from memory is what the rows in flight,
two per multiprocessor, exceed the cache by. Operators on tokens take per token

    GAE                                      17 bytes; Triton 26, in two sweeps, of long sequences
    policy loss and gradient, token level    14, the mask being counted first
    the same, sequence level                 32, in three sweeps, by one program per sequence
    group advantages                         17, and 25 with ids

at the copy rate, of which a multiprocessor alone has at most twice its share. What fits into the
cache in all is read from there the second time. Cases bound by launches are compared with the time
of their kernels alone.

Of the linear forms, each GEMM and kernel takes the longer of its arithmetic and its traffic, and
they follow each other, for N / C chunks of C rows, at F operations and B bytes per second:

    logits        max(2CHV / F, (2VH + 2CH + 4CV) / B)       16-bit operands, float32 logits
    one kernel    R CV / B                                   R: bytes per logit
    d hidden      max(2CHV / F, (2CV + 2VH + 4CH) / B)
    d weight      max(2CHV / F, (2CV + 2CH + 8VH) / B)       read, written; first chunk: 4VH
    once a call   6VH / B                                    sums to bfloat16, or a weight to it

R is 6 (4 read, 2 written) where a row waits for its gradient in shared memory (the CUDA kernel in a
cluster), and 10 where all of it comes from memory again (the Triton kernel; part of it will still
be in cache). `--chunks` prints both, for an H100 and several sizes of a chunk: the first row is the
default, the others have so many bytes. That is the best case, in which a GEMM hides all of its
traffic; "in turn" has the sums in place of the maxima, the worst case. Three bare GEMMs take the
longer of 6NHV / F and their traffic with bfloat16 results. Nothing here is a measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from fastrl.bench.case import BACKWARD, BOTH, FORWARD
from fastrl.bench.cases import SELECTIONS, cases
from fastrl.bench.report import Results, Row, median
from fastrl.ops._head.head import LinearHead
from fastrl.ops._rows import order
from fastrl.ops._vocabulary_parts.parts import UNSPLIT

MIB = 2**20
RESIDENT = 2  # rows in flight on a multiprocessor
APART = 0.2  # of the prediction: a difference with a cause that has to be found
GAE_CHUNK = 2048  # tokens of a program of Triton's: longer sequences take two launches
ALONE = 2.0  # share of the copy rate, in its own shares, that a multiprocessor has alone
#: What a run would measure of an H100, as far as the models need it.
MACHINE = {
    "copy GB/s": 3000.0,
    "bfloat16 GEMM TFLOP/s": 700.0,
    "multiprocessors": 132,
    "cache MB": 52.4,
}
Machine = dict[str, float]


class Rates(NamedTuple):
    """What a GPU does per second."""

    flops: float
    bytes: float
    overlapped: bool = True  # a GEMM takes the longer of arithmetic and traffic; otherwise the sum

    def seconds(self, operations: float, moved: float) -> float:
        """Return the time of a GEMM."""
        parts = operations / self.flops, moved / self.bytes
        return max(parts) if self.overlapped else sum(parts)


def rates_of(machine: Machine) -> Rates:
    return Rates(machine["bfloat16 GEMM TFLOP/s"] * 1e12, machine["copy GB/s"] * 1e9)


# --- rows of logits, and tokens


def has_prediction(case: Row) -> bool:
    """Return whether a model is there.

    There is none of teachers, of kept tokens, nor of a loss without its gradient.
    """
    computed_forward = case["op"].endswith("policy_loss") and case["step"] == FORWARD
    other_work = case["op"].endswith("divergence") or case["variant"].endswith(("teacher", "kept"))
    return not other_work and not computed_forward


def seconds(case: Row, provider: str, machine: Machine) -> float:
    """Return the predicted seconds of a call, without its launches."""
    sizes = case["shape"]
    if case["op"].startswith("linear_"):
        return _linear(case, provider, machine, **sizes)
    rate, moved = rates_of(machine).bytes, float(case["bytes_moved"])
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


# --- linear forms


def chunk_rows(
    hidden: int, vocabulary: int, limit: int | None = None, *, trained: bool = True
) -> int:
    """Return the rows of a chunk of at most `limit` bytes, or by default, for a bfloat16 head."""
    weight = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device="meta")
    lm_head = LinearHead(weight, None, None, None, 1.0, torch.float32)
    grows = trained and limit is None
    with mock.patch.object(order, "_GPU_CHUNK_BYTES", limit or order._GPU_CHUNK_BYTES):
        return order.chunk_size(None, lm_head, UNSPLIT, 1, on_gpu=True, weight_trained=grows)


def gemms(rows: int, hidden: int, vocabulary: int, rates: Rates, *, first: bool) -> list[float]:
    """Return the seconds of the GEMMs of a chunk: projection, and gradients of both operands."""
    weight, logits, states = vocabulary * hidden, rows * vocabulary, rows * hidden
    moved = (
        2 * weight + 2 * states + 4 * logits,
        2 * logits + 2 * weight + 4 * states,
        2 * logits + 2 * states + (4 if first else 8) * weight,  # the first is written only
    )
    return [rates.seconds(2 * rows * weight, one) for one in moved]


def chunked(
    rows: int, hidden: int, vocabulary: int, chunk: int, moved: float, rates: Rates,
    *, trained: bool = True,
) -> float:  # fmt: skip
    """Return the seconds of loss and gradients; `moved`: bytes per logit of the kernel."""
    total = 6 * vocabulary * hidden / rates.bytes if trained else 0.0
    for part in order.chunks(0, rows, min(chunk, rows), on_gpu=True):
        size, first = part.stop - part.start, part.start == 0
        each = gemms(size, hidden, vocabulary, rates, first=first)
        total += sum(each if trained else each[:2]) + moved * size * vocabulary / rates.bytes
    return total


def _linear(
    case: Row, provider: str, machine: Machine, rows: int, hidden: int, vocabulary: int
) -> float:
    rates = rates_of(machine)
    trained = "frozen" not in case["variant"]
    active = rows // 2 if "masked" in case["variant"] else rows
    chunk = chunk_rows(hidden, vocabulary, trained=trained)
    again = second_reading(machine, min(active, chunk), 4 * vocabulary)
    sizes = active, hidden, vocabulary
    if case["op"] == "linear_policy_loss":
        moved = 6 + (4 * again if "triton" in provider else 0.0)
        return chunked(*sizes, chunk, moved, rates, trained=trained)
    scored = gemms(*sizes, rates, first=True)[0] + 4 * active * vocabulary / rates.bytes
    # the backward projects again, reads the logits once, and writes their gradient
    gradients = chunked(*sizes, chunk, 6, rates)
    return {FORWARD: scored, BACKWARD: gradients, BOTH: scored + gradients}[case["step"]]


# --- tables


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


def _pairs(case: Row, machine: Machine) -> Iterator[tuple[str, float, float]]:
    """Yield each kernel backend of fastrl with its predicted and its measured seconds."""
    for row in case["providers"]:
        if row["seconds"] and row["name"] in ("fastrl triton", "fastrl cuda"):
            took = median(row) if row["kernels"] is None else row["kernels"]
            yield row["name"], seconds(case, row["name"], machine), took


def _in_words(time: float) -> str:
    return f"{time * 1e3:.3f} ms" if time >= 1e-3 else f"{time * 1e6:.1f} us"


def of_h100() -> list[str]:
    lines = [f"{MACHINE}\n", "| case | Triton | CUDA |", "| --- | ---: | ---: |"]
    device = torch.device("cuda")
    for case in cases(SELECTIONS["cuda"], (FORWARD, BOTH), device, ("triton", "cuda"), ()):
        kept = case.described()
        if has_prediction(kept):
            times = [seconds(kept, f"fastrl {backend}", MACHINE) for backend in ("triton", "cuda")]
            lines.append(f"| {case.name} | {' | '.join(map(_in_words, times))} |")
    return lines


def of_chunks(rows: int, hidden: int, vocabulary: int) -> list[str]:
    sizes, best = (rows, hidden, vocabulary), rates_of(MACHINE)
    traffic = 2 * (rows * hidden + hidden * vocabulary + rows * vocabulary)
    bare = 3 * best.seconds(2 * rows * hidden * vocabulary, traffic)
    lines = [f"{rows} x {hidden} x {vocabulary}: three bare GEMMs {bare * 1e3:.1f} ms\n"]
    columns = ("ms, R = 6", "/ bare", "in turn", "ms, R = 10", "/ bare", "in turn")
    lines.append("| chunk, MiB | rows | chunks | " + " | ".join(columns) + " |")
    lines.append("| ---: |" + " ---: |" * 8)
    for limit in (None, 128, 256, 512, 1024, 2048, 4096):
        chunk = chunk_rows(hidden, vocabulary, limit and limit * MIB)
        cells = [limit or "default", chunk, -(-rows // chunk)]
        for moved in (6, 10):
            time = chunked(*sizes, chunk, moved, best)
            in_turn = chunked(*sizes, chunk, moved, best._replace(overlapped=False))
            cells += [f"{1e3 * time:.1f}", f"{time / bare:.2f}", f"{1e3 * in_turn:.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", help="of `fastrl bench` on a GPU")
    sizes = ("ROWS", "HIDDEN", "VOCABULARY")
    parser.add_argument("--chunks", type=int, nargs=3, metavar=sizes, help="of the linear loss")
    given = parser.parse_args()
    if given.chunks:
        lines = of_chunks(*given.chunks)
    else:
        lines = table(json.loads(given.results.read_text())) if given.results else of_h100()
    print("\n".join(lines))


if __name__ == "__main__":
    main()
