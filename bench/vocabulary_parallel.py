"""Predicted time and bytes of a vocabulary that is split over ranks, on GPUs with NVLink.

    python bench/vocabulary_parallel.py [--rows 8192 --hidden 4096 --vocab 128256]

For the linear policy loss with all gradients of N rows on R ranks, V' = V / R columns each, in
chunks of C rows (`fastrl/ops/_linear/chunks.py`; two exist at once):

    GEMMs and kernels   as in linear_prediction.py with V', 10 bytes per logit
    statistics          20 bytes per row to every other rank:  L + 20 C (R - 1) / W
    d hidden            all-reduce in float32, as a ring:      L + 2 (R - 1) / R  4 C H / W

W is 450 GB/s: 900 GB/s of NVLink on an H100 or H200, half of it in each direction. L = 20 us is the
latency of a collective of a few KB among 8 GPUs of a machine, an assumption. The statistics of a
chunk travel while the next one is projected or the one before is differentiated, the gradient of
its hidden states while the next one's GEMMs run. Collectives follow each other; what a rank waits
for is `exposed`. Nothing here is a measurement.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from linear_prediction import H100, chunk_seconds, chunk_sizes, predicted, shape_of_arguments

from fastrl.ops._linear.chunks import chunk_size
from fastrl.ops._linear.head import LinearHead
from fastrl.ops._vocabulary_parts.parts import VocabularyParts

LINK, LATENCY = 450e9, 20e-6
#: float32 numbers that a rank sends of each row
STATISTICS = 5


def chunk_rows(width: int, vocabulary: int, ranks: int) -> int:
    """Return the rows of a chunk."""
    sizes = [vocabulary // ranks + (i < vocabulary % ranks) for i in range(ranks)]
    weight = torch.empty(sizes[0], width, dtype=torch.bfloat16, device="meta")
    head = LinearHead(weight, None, None, None, 1.0, torch.float32)
    parts = VocabularyParts("", 0, sizes if ranks > 1 else [], True)
    buffers = 2 if ranks > 1 else 1
    return chunk_size(None, head, parts, buffers, on_gpu=True, weight_trained=True)


class Collectives(NamedTuple):
    """What the ranks exchange: bytes that each sends, the seconds, and those it waits for."""

    statistics: float
    hidden: float
    seconds: float
    exposed: float


def collectives(rows: int, width: int, vocabulary: int, ranks: int, chunk: int) -> Collectives:
    """Go through a call in the order of `fastrl/ops/_linear`; collectives follow each other."""
    sizes, own = chunk_sizes(rows, chunk), -(-vocabulary // ranks)
    statistics = [4 * STATISTICS * size * (ranks - 1) for size in sizes]
    hidden = [2 * (ranks - 1) / ranks * 4 * size * width for size in sizes]
    now = link = computing = 0.0
    arrived: dict[str, float] = {}

    def compute(seconds: float) -> None:
        nonlocal now, computing
        now, computing = now + seconds, computing + seconds

    def send(name: str, size: float) -> None:
        nonlocal link
        link = arrived[name] = max(now, link) + LATENCY + size / LINK

    def wait(name: str) -> None:
        nonlocal now
        now = max(now, arrived[name])

    def finish(i: int) -> None:
        wait(f"statistics {i}")
        gemms = chunk_seconds(sizes[i], width, own, first=i == 0)
        compute(6 * sizes[i] * own / H100.bytes + gemms.of_hidden + gemms.of_weight)
        if i:
            wait(f"hidden {i - 1}")
        send(f"hidden {i}", hidden[i])

    for i, size in enumerate(sizes):
        projection = chunk_seconds(size, width, own, first=i == 0).projection
        compute(projection + 4 * size * own / H100.bytes)
        send(f"statistics {i}", statistics[i])
        if i:
            finish(i - 1)
    finish(len(sizes) - 1)
    wait(f"hidden {len(sizes) - 1}")
    sent = sum(statistics) + sum(hidden)
    seconds = 2 * len(sizes) * LATENCY + sent / LINK
    return Collectives(sum(statistics), sum(hidden), seconds, now - computing)


def main() -> None:
    N, H, V = shape_of_arguments(__doc__.splitlines()[0])
    rows = chunk_rows(H, V, 1)
    alone = predicted(N, H, V, rows, 10)
    print(f"{N} x {H} x {V}; one GPU, no split, chunks of {rows} rows: {1e3 * alone:.1f} ms\n")
    print(
        "| ranks | rows in a chunk | GEMMs and kernels, ms | statistics, MB | d hidden, MB "
        "| collectives, ms | exposed, ms | exposed / total | speed-up |"
    )
    print("| ---: |" + " ---: |" * 8)
    for ranks in (2, 4, 8):
        rows = chunk_rows(H, V, ranks)
        compute = predicted(N, H, -(-V // ranks), rows, 10)
        sent = collectives(N, H, V, ranks, rows)
        total = compute + sent.exposed
        cells = [
            f"{ranks} | {rows} | {1e3 * compute:.1f}",
            *(f"{size / 1e6:.2f}" for size in (sent.statistics, sent.hidden)),
            *(f"{1e3 * seconds:.2f}" for seconds in (sent.seconds, sent.exposed)),
            f"{sent.exposed / total:.1%} | {alone / total:.2f}",
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
