"""The processes of bench/gpu.py that use the GPU: they make jobs and write each result at once.

    python bench/gpu_jobs.py --out OUT --shapes gpu --until 12345.6 0 1 2 "graph 3 eager"

A process ends when a provider has cost it the GPU or a capture has failed; gpu.py starts another
one for what is left. No job starts after `--until`, of the monotonic clock.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from gpu_cases import SHAPES, items
from gpu_item import backends
from gpu_journal import Journal
from gpu_timing import ContextLostError, Plan, anchors, capturable, measure, replayed

import fastrl

PEERS = ("peer", "compile")
LENGTHS = 50  # different lengths in a row, including compilation


def main() -> int:
    options = _options()
    device = torch.device("cpu" if options.shapes == "smoke" else "cuda")
    parent = os.getppid()
    journal = Journal(options.out)
    work = Jobs(options.shapes, device, journal, peers=options.peers)
    for job in options.jobs:
        if time.monotonic() > options.until or os.getppid() != parent:
            return 0
        journal.append(job=job, started=time.time())
        try:
            journal.append(job=job, result=work.make(job, journal.left_out(job)))
        except ContextLostError as lost:
            journal.append(job=job, lost=lost.provider, why=lost.why)
            return 1
        except Exception as failure:
            journal.append(job=job, failure=f"{type(failure).__name__}: {str(failure)[:400]}")
            if job.startswith("graph"):
                return 1
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", choices=SHAPES, required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("jobs", nargs="+")
    return parser.parse_args()


class Jobs:
    """The jobs on the shapes of a selection."""

    def __init__(self, shapes: str, device: torch.device, journal: Journal, *, peers: bool) -> None:
        self.smoke, self.journal, self.peers = shapes == "smoke", journal, peers
        self.items, self.device = list(items(SHAPES[shapes], device)), device

    def make(self, job: str, left_out: dict[str, str]) -> dict:
        if job == "anchors":
            return self._anchors()
        if job == "lengths":
            return different_lengths(self.device, 3 if self.smoke else LENGTHS)
        if job.startswith("graph "):
            _, number, name = job.split(" ", 2)
            case = self.items[int(number)].make()
            (provider,) = (one for one in capturable(case) if one.name == name)
            return {"milliseconds": replayed(provider, case, self.device)}
        return self._case(job, left_out)

    def _anchors(self) -> dict:
        elements = 2**10 if self.smoke else 2**30
        gemms = [(8, 16, 8)] if self.smoke else [(8192, 128256, 4096), (8192, 151936, 896)]
        return anchors(self.device, elements=elements, gemms=gemms)

    def _case(self, job: str, left_out: dict[str, str]) -> dict:
        item = self.items[int(job)]
        case = item.make()
        if not self.peers:
            case = case._replace(providers=[p for p in case.providers if p.kind not in PEERS])

        def trying(provider: str) -> None:
            self.journal.append(job=job, trying=provider)

        plan = Plan(1, 2, 2, 0.1) if self.smoke else Plan()
        found = measure(case, self.device, plan, left_out, trying, small=item.small)
        kept = {name: getattr(case, name) for name in ("op", "work", "shape", "bytes_moved")}
        kept |= {"dtype": str(case.dtype).removeprefix("torch."), "label": case.label}
        kept |= {"flops": item.flops, "small": item.small, "density": item.density}
        ran = {one.provider for one in found if one.samples and item.small}
        kept["graphs"] = [one.name for one in capturable(case) if one.name in ran]
        return {**kept, "providers": [one._asdict() for one in found]}


def different_lengths(device: torch.device, count: int) -> dict[str, float]:
    """Seconds for calls that all differ in length: the first time with compilation, then again."""
    backend = backends(device)[0]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 4096, (count,), generator=generator).tolist()

    def once(T: int) -> None:
        logprobs = torch.randn(8, T, device=device) - 2
        mask = torch.ones_like(logprobs)
        fastrl.policy_loss(logprobs, mask[:, 0], mask, old_logprobs=logprobs, backend=backend)
        fastrl.gae(logprobs, mask, mask, backend=backend)
        logits = torch.randn(1, T, 1000, device=device)
        ids = torch.zeros(1, T, dtype=torch.int64, device=device)
        fastrl.token_stats(logits, ids, backend=backend)

    found = {}
    for what in ("first time", "second time"):
        start = time.perf_counter()
        for T in lengths:
            once(T)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found[f"{count} lengths, {what}, s"] = time.perf_counter() - start
    return found


if __name__ == "__main__":
    sys.exit(main())
