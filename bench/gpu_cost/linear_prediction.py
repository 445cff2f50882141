"""Predicted time of the linear policy loss on a GPU, for several sizes of its chunks.

    python bench/gpu_cost/linear_prediction.py [--rows 8192 --hidden 4096 --vocab 128256]

Each GEMM and kernel takes the longer of its arithmetic and its traffic, and they follow each other:

    logits        max(2CHV / F, (2VH + 2CH + 4CV) / B)       16-bit operands, float32 logits
    one kernel    R CV / B, R = 6 or 10                      4 read, 2 written; 4 read again or not
    d hidden      max(2CHV / F, (2CV + 2VH + 4CH) / B)
    d weight      max(2CHV / F, (2CV + 2CH + 8VH) / B)       read, written; first chunk: 4VH
    once a call   6VH / B                                    sums to bfloat16, or a weight to it

for N / C chunks of C rows, with F = 700 TFLOP/s and B = 3 TB/s of an H100. That is the best case,
in which a GEMM hides all of its traffic; "in turn" has the sums in place of the maxima, the worst
case. The first row is the default, the others have chunks of so many bytes. R is 6 where a row
waits for its gradient in shared memory (the CUDA kernel in a cluster), and 10 where all of it comes
from memory again (the Triton kernel; part of it will still be in cache). Three bare GEMMs take the
longer of 6NHV / F and their traffic with bfloat16 results. Nothing here is a measurement.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple
from unittest import mock

import torch

from fastrl.ops._head.head import LinearHead
from fastrl.ops._rows import order
from fastrl.ops._vocabulary_parts.parts import UNSPLIT

MIB = 2**20


class Rates(NamedTuple):
    """What a GPU does per second."""

    flops: float = 700e12
    bytes: float = 3e12
    overlapped: bool = True  # a GEMM takes the longer of arithmetic and traffic; otherwise the sum

    def seconds(self, operations: float, moved: float) -> float:
        """Return the time of a GEMM."""
        parts = operations / self.flops, moved / self.bytes
        return max(parts) if self.overlapped else sum(parts)


H100 = Rates()


def chunk_rows(
    width: int, vocabulary: int, limit: int | None = None, *, trained: bool = True
) -> int:
    """Return the rows of a chunk of at most `limit` bytes, or by default, for a bfloat16 head."""
    weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, device="meta")
    head = LinearHead(weight, None, None, None, 1.0, torch.float32)
    grows = trained and limit is None
    with mock.patch.object(order, "_GPU_CHUNK_BYTES", limit or order._GPU_CHUNK_BYTES):
        return order.chunk_size(None, head, UNSPLIT, 1, on_gpu=True, weight_trained=grows)


def predicted(
    rows: int,
    width: int,
    vocabulary: int,
    chunk: int,
    moved: float,
    *,
    trained: bool = True,
    rates: Rates = H100,
) -> float:
    """Return the seconds of loss and gradients; `moved`: bytes per logit of the kernel."""
    seconds = 6 * vocabulary * width / rates.bytes if trained else 0.0
    for part in order.chunks(0, rows, min(chunk, rows), on_gpu=True):
        size, first = part.stop - part.start, part.start == 0
        one = chunk_seconds(size, width, vocabulary, first=first, rates=rates)
        seconds += one.projection + moved * size * vocabulary / rates.bytes + one.of_hidden
        seconds += one.of_weight if trained else 0.0
    return seconds


class Gemms(NamedTuple):
    """Seconds of the GEMMs of a chunk."""

    projection: float
    of_hidden: float
    of_weight: float


def chunk_seconds(
    size: int, width: int, vocabulary: int, *, first: bool, rates: Rates = H100
) -> Gemms:
    """Return the seconds of the GEMMs of a chunk; the first writes the weight's gradient only."""
    weight, logits, states = vocabulary * width, size * vocabulary, size * width
    gemm = 2 * size * weight
    return Gemms(
        rates.seconds(gemm, 2 * weight + 2 * states + 4 * logits),
        rates.seconds(gemm, 2 * logits + 2 * weight + 4 * states),
        rates.seconds(gemm, 2 * logits + 2 * states + (4 if first else 8) * weight),
    )


def bare_gemms(rows: int, width: int, vocabulary: int) -> float:
    """Return the seconds of three GEMMs over all rows, with results in bfloat16."""
    traffic = 2 * (rows * width + width * vocabulary + rows * vocabulary) / H100.bytes
    return 3 * max(2 * rows * width * vocabulary / H100.flops, traffic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    given = parser.parse_args()
    N, H, V = shape = given.rows, given.hidden, given.vocab
    bare = bare_gemms(*shape)
    print(f"{N} x {H} x {V}: three bare GEMMs {bare * 1e3:.1f} ms\n")
    columns = ("ms, R = 6", "/ bare", "in turn", "ms, R = 10", "/ bare", "in turn")
    print("| chunk, MiB | rows | chunks | " + " | ".join(columns) + " |")
    print("| ---: |" + " ---: |" * 8)
    for limit in (None, 128, 256, 512, 1024, 2048, 4096):
        rows = chunk_rows(H, V, limit and limit * MIB)
        cells = []
        for moved in (6, 10):
            best, worst = (
                predicted(*shape, rows, moved, rates=rates)
                for rates in (H100, H100._replace(overlapped=False))
            )
            cells.append(f"{1e3 * best:.1f} | {best / bare:.2f} | {1e3 * worst:.1f}")
        print(f"| {limit or 'default'} | {rows} | {-(-N // rows)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
