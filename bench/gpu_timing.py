"""The timer of bench/gpu.py: providers take turns, with CUDA events around each full call.

On a CPU (`--smoke`) the clock takes the place of the events, so that the same code runs there.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from typing import Any, NamedTuple

import torch
from timing import COPIES, Case, Inputs, Provider, rotation

REPLAYS = 20  # calls in a captured graph, whose time has no host in it


class Measured(NamedTuple):
    """One provider of a case; times in milliseconds."""

    provider: str
    kind: str
    samples: list[float]  # the whole public call
    device: float | None  # the same replayed from a CUDA graph: kernels alone
    host: float | None  # what a call takes the host, where nothing waits for it
    peak: int  # bytes beyond what was allocated before the call
    error: float
    failure: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples) if self.samples else math.nan

    def quantiles(self) -> tuple[float, float]:
        ordered = sorted(self.samples)
        return ordered[len(ordered) // 5], ordered[len(ordered) * 4 // 5]


class Plan(NamedTuple):
    warmup: int = 20
    samples: int = 50
    sets: int = 3  # of inputs, so that none stays in the cache
    seconds: float = 2.0  # that one provider may take in all; slower ones get fewer samples


def measure(case: Case, device: torch.device, plan: Plan, *, small: bool) -> list[Measured]:
    """Check every provider against float64, then time them in turn."""
    turns = rotation(case, plan.sets)
    first = next(turns)
    found = {provider.name: _checked(case, provider, first, device) for provider in case.providers}
    running = [provider for provider in case.providers if not found[provider.name].failure]
    left = {}
    for provider in running:
        slow = _timed(provider, first, device) / 1e3
        calls = plan.seconds / max(slow, 1e-6)
        for _ in range(int(min(plan.warmup, calls / 4))):
            _timed(provider, next(turns), device)
        left[provider.name] = int(max(3, min(plan.samples, calls)))
    order = random.Random(0)
    while remaining := [provider for provider in running if left[provider.name]]:
        for provider in order.sample(remaining, len(remaining)):
            found[provider.name].samples.append(_timed(provider, next(turns), device))
            left[provider.name] -= 1
    if small:
        for provider in running:
            found[provider.name] = found[provider.name]._replace(
                device=_replayed(provider, first, device), host=_host(provider, first, device)
            )
    return list(found.values())


def _checked(case: Case, provider: Provider, inputs: Inputs, device: torch.device) -> Measured:
    """Error and peak memory of a provider, or the reason why it could not run."""
    try:
        ready = provider.prepare(inputs)
        before = _allocated(device)
        answer = provider.run(ready)
        peak = _peak(device) - before
        error = math.nan if provider.kind in COPIES else case.error(answer, inputs)
    except Exception as failure:  # a peer that fails is a row of the table, not the end of the run
        reason = str(failure).strip().splitlines() or [""]
        words = f"{type(failure).__name__}: {reason[0][:160]}"
        return Measured(provider.name, provider.kind, [], None, None, 0, math.nan, words)
    return Measured(provider.name, provider.kind, [], None, None, peak, error)


def _timed(provider: Provider, inputs: Inputs, device: torch.device) -> float:
    ready = provider.prepare(inputs)
    if device.type != "cuda":
        start = time.perf_counter()
        answer = provider.run(ready)
        elapsed = (time.perf_counter() - start) * 1e3
        del answer
        return elapsed
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    answer = provider.run(ready)
    end.record()
    end.synchronize()
    del answer
    return start.elapsed_time(end)


def _replayed(provider: Provider, inputs: Inputs, device: torch.device) -> float | None:
    """Milliseconds of a call's kernels alone, or None where it cannot be captured."""
    if device.type != "cuda" or provider.kind == "compile":
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(REPLAYS):
                provider.run(inputs)
    except Exception:
        torch.cuda.synchronize()
        return None
    once = Provider(provider.name, provider.kind, lambda _: graph.replay())
    return statistics.median(_timed(once, inputs, device) for _ in range(5)) / REPLAYS


def _host(provider: Provider, inputs: Inputs, device: torch.device) -> float:
    """Host milliseconds per call; launches are only queued."""
    start = time.perf_counter()
    for _ in range(REPLAYS):
        provider.run(inputs)
    elapsed = (time.perf_counter() - start) * 1e3 / REPLAYS
    if device.type == "cuda":
        torch.cuda.synchronize()
    return elapsed


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def anchors(device: torch.device, *, elements: int, gemms: list[tuple[int, ...]]) -> dict[str, Any]:
    """What this machine can do: bytes per second of a copy, FLOP/s of GEMMs."""
    source = torch.randn(elements, device=device).bfloat16()
    target = torch.empty_like(source)
    copies = Provider("copy", "floor", lambda inputs: target.copy_(source))
    milliseconds = [_timed(copies, {}, device) for _ in range(20)][5:]
    found = {"copy TB/s": 2 * source.nbytes / statistics.median(milliseconds) / 1e9}
    for m, n, k in gemms:
        a = torch.randn(m, k, device=device).bfloat16()
        b = torch.randn(n, k, device=device).bfloat16()
        product = Provider("mm", "floor", lambda inputs, a=a, b=b: a @ b.T)
        milliseconds = [_timed(product, {}, device) for _ in range(8)][3:]
        found[f"{m} x {n} x {k} bf16 TFLOP/s"] = (
            2 * m * n * k / statistics.median(milliseconds) / 1e9
        )
    return found
