"""The timer of bench/gpu.py: providers take turns, with CUDA events around each full call.

On a CPU (`--smoke`) the clock takes the place of the events, so that the same code runs there.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from timing import COPIES, Case, Inputs, Provider, rotation

REPLAYS = 21  # calls in a captured graph, whose time has no host in it
SETS = 3  # of inputs, so that none stays in the cache
UNCHECKED = (*COPIES, "scaled")  # kinds without an error of their own
NOT_CAPTURED = ("compile", "loop")  # a Python loop would be a graph of a million nodes


class Measured(NamedTuple):
    """One provider of a case; times in milliseconds."""

    provider: str
    kind: str
    samples: list[float]  # the whole public call
    host: float | None  # what a call takes the host, where nothing waits for it
    peak: int  # bytes beyond what was allocated before the call
    error: float | None  # None where the provider computes something else
    failure: str = ""


class Plan(NamedTuple):
    warmup: int = 8
    samples: int = 40
    sets: int = SETS
    seconds: float = 1.0  # that one provider may take in all; slower ones get fewer samples


class ContextLostError(RuntimeError):
    """A provider left the GPU in a state in which every call of this process fails."""

    def __init__(self, provider: str, why: str) -> None:
        super().__init__(f"{provider}: {why}")
        self.provider, self.why = provider, why


def measure(
    case: Case,
    device: torch.device,
    plan: Plan,
    left_out: Mapping[str, str],
    trying: Callable[[str], None],
    *,
    small: bool,
) -> list[Measured]:
    """Check every provider against float64, then time them in turn.

    `left_out` are providers that cost an earlier process its GPU or its time, and why; `trying` is
    told which provider is called next, which may compile for long.
    """
    torch._dynamo.reset()  # each shape compiled for itself: the strongest form of torch.compile
    turns = rotation(case, plan.sets)
    first = next(turns)
    found = {}
    for provider in case.providers:
        why = left_out.get(provider.name)
        trying(provider.name)
        found[provider.name] = (
            _checked(case, provider, first, device) if why is None else _failed(provider, why)
        )
    left = {}
    for provider in case.providers:
        if not found[provider.name].failure:
            trying(provider.name)
            warm = _guarded(provider, next(turns), device, found)
            calls = plan.seconds / max(warm / 1e3, 1e-6)
            for _ in range(int(min(plan.warmup, calls / 4))):
                _guarded(provider, next(turns), device, found)
            left[provider.name] = int(max(3, min(plan.samples, calls)))
    trying("")
    order = random.Random(0)
    while running := [p for p in case.providers if left.get(p.name) and not found[p.name].failure]:
        for provider in order.sample(running, len(running)):
            took = _guarded(provider, next(turns), device, found)
            found[provider.name].samples.append(took)
            left[provider.name] -= 1
    for provider in case.providers if small else ():
        if not found[provider.name].failure and not provider.prepares:
            try:
                spent = _host(provider, first, device)
                found[provider.name] = found[provider.name]._replace(host=spent)
            except Exception as failure:
                _raise_if_lost(provider, failure, device)
                found[provider.name] = _failed(provider, _in_words(failure))
    return list(found.values())


def _guarded(
    provider: Provider, inputs: Inputs, device: torch.device, found: dict[str, Measured]
) -> float:
    """Time a call; a provider that fails now is a row of the table, not the end of the run."""
    try:
        return _timed(provider, inputs, device)
    except Exception as failure:
        _raise_if_lost(provider, failure, device)
        found[provider.name] = _failed(provider, _in_words(failure))
        return math.inf


def _checked(case: Case, provider: Provider, inputs: Inputs, device: torch.device) -> Measured:
    """Error and peak memory of a provider, or the reason why it could not run."""
    try:
        ready = provider.prepare(inputs)
        before = _allocated(device)
        answer = provider.run(ready)
        peak = _peak(device) - before
        error = None if provider.kind in UNCHECKED else case.error(answer, inputs)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as failure:
        _raise_if_lost(provider, failure, device)
        return _failed(provider, _in_words(failure))
    return Measured(provider.name, provider.kind, [], None, peak, error)


def _failed(provider: Provider, why: str) -> Measured:
    return Measured(provider.name, provider.kind, [], None, 0, None, why)


def _in_words(failure: Exception) -> str:
    reason = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {reason[0][:160]}"


def _raise_if_lost(provider: Provider, failure: Exception, device: torch.device) -> None:
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            raise ContextLostError(provider.name, _in_words(failure)) from failure


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


def capturable(case: Case) -> list[Provider]:
    """Return the providers whose kernels are timed alone, replayed from a graph.

    One that writes over its inputs would find what it wrote in the next call.
    """
    return [p for p in case.providers if p.kind not in NOT_CAPTURED and not p.prepares]


def replayed(provider: Provider, case: Case, device: torch.device) -> float:
    """Return the milliseconds of a call's kernels alone, over several sets of inputs in turn.

    A capture that fails leaves torch's allocator in a state that only a new process mends (until
    torch 2.12), so call this in a process that may end.
    """
    turns = rotation(case, SETS)
    if device.type != "cuda":
        return _timed(provider, next(turns), device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles and warms up outside the capture
            provider.run(next(turns))
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYS):
            provider.run(next(turns))
    once = Provider(provider.name, provider.kind, lambda _: graph.replay())
    return statistics.median(_timed(once, {}, device) for _ in range(10)) / REPLAYS


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
    """What this machine can do: bytes per second of a copy, FLOP/s of GEMMs; and its sizes."""
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
    chip = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    found["multiprocessors"] = chip.multi_processor_count if chip else 1
    found["cache MB"] = chip.L2_cache_size / 1e6 if chip else 1.0
    return found
