"""Peak memory of the linear policy loss on ranks that split the vocabulary, each a process.

    python bench/studies/vocabulary_parallel_memory.py [--rows 2048 --hidden 896 --vocab 151936]

Every rank makes its part of the LM head, warms up with a small call, resets the kernel's high-water
mark of resident memory, makes one call with its backward (gloo, CPU), and reads the mark.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import fastrl
from fastrl.bench.memory import Peak
from fastrl.ops._head.head import LinearHead
from fastrl.ops._rows.order import chunk_size, chunks
from fastrl.ops._vocabulary_parts.parts import VocabularyParts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args()
    print(f"{given.rows} x {given.hidden} x {given.vocab} in float32, MB of every rank\n")
    print("| ranks | LM head | logits in chunks | peak, frozen head | peak, trained head |")
    print("| ---: |" + " ---: |" * 4)
    for ranks in given.ranks:
        rows = [_on_ranks(ranks, given, trained) for trained in (False, True)]
        frozen, trained = (", ".join(f"{x[-1]:.0f}" for x in row) for row in rows)
        head, chunk = (", ".join(f"{x[i]:.0f}" for x in rows[0]) for i in (0, 1))
        print(f"| {ranks} | {head} | {chunk} | {frozen} | {trained} |", flush=True)


def _on_ranks(ranks: int, given: argparse.Namespace, trained: bool) -> list[list[float]]:
    """Return MB of the head, of the chunks and of the peak beyond the inputs, of every rank."""
    with tempfile.TemporaryDirectory() as directory:
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (ranks, directory, given, trained, queue)
        multiprocessing.spawn(_rank, arguments, nprocs=ranks)
        found = dict(queue.get() for _ in range(ranks))
    return [found[rank] for rank in range(ranks)]


def _rank(
    rank: int, ranks: int, directory: str, given: argparse.Namespace, trained: bool, queue: object
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # parts of a vocabulary differ
    where = f"file://{directory}/ranks"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    own = given.vocab // ranks + (rank < given.vocab % ranks)

    def peak_of_a_call(rows: int, vocabulary: int, own: int) -> int:
        weight = torch.randn(own, given.hidden, requires_grad=trained)
        hidden = torch.randn(rows, given.hidden, requires_grad=True)
        ids, advantages = torch.randint(vocabulary, (rows,)), torch.randn(rows)
        ids, advantages = (_same(x) for x in (ids, advantages))
        with torch.no_grad():
            hidden.copy_(_same(hidden.detach()))
        with Peak(hidden.device) as peak:
            fastrl.linear_policy_loss(
                hidden, weight, ids, advantages, torch.ones(rows), objective="dapo",
                vocab_group=dist.group.WORLD,
            ).loss.backward()  # fmt: skip
        return peak.bytes or 0

    peak_of_a_call(8, 64 * ranks, 64)
    peak = peak_of_a_call(given.rows, given.vocab, own)
    logits = 4 * own * rows_at_once(given, own, ranks)
    megabytes = [4 * own * given.hidden, logits, peak]
    queue.put((rank, [x / 1e6 for x in megabytes]))
    dist.destroy_process_group()


def rows_at_once(given: argparse.Namespace, own: int, ranks: int) -> int:
    """Return how many rows of logits exist at once: one chunk, or two on several ranks."""
    weight = torch.empty(own, given.hidden, device="meta")
    head = LinearHead(weight, None, None, None, 1.0, torch.float32)
    buffers, sizes = (2, [given.vocab // ranks] * ranks) if ranks > 1 else (1, [])
    size = chunk_size(None, head, VocabularyParts("", 0, sizes, True), buffers, on_gpu=False)
    longest = max(one.stop - one.start for one in chunks(0, given.rows, size, on_gpu=False))
    return buffers * longest


def _same(values: torch.Tensor) -> torch.Tensor:
    """Return the values of the first rank."""
    dist.broadcast(values, 0)
    return values


if __name__ == "__main__":
    main()
