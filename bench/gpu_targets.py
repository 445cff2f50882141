"""What bench/gpu.py holds against the project's targets: ratios of two times of one case."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Entry = dict[str, Any]
#: Yields backend, what was found in words, and its value.
Ratios = Callable[[str, Entry, dict[str, Entry]], Iterator[tuple[str, str, float]]]
OTHERS = ("peer", "eager", "compile")  # kinds that do the same work as fastrl


class Target(NamedTuple):
    """A number of one case, and what it should reach, the least first."""

    name: str
    case: tuple[str, str, str]  # work, shape, dtype
    ratios: Ratios
    sign: str
    limits: tuple[float, ...]


def targets(results: dict[str, Entry]) -> list[str]:
    """Return the table of the targets."""
    cases = {
        (one["result"]["work"], one["result"]["shape"], one["result"]["dtype"]): (
            job,
            one["result"],
        )
        for job, one in results.items()
        if job.isdigit() and "result" in one
    }
    lines = ["### Targets", "", "| target | backend | found | |", "| --- | --- | ---: | --- |"]
    for target in TARGETS:
        name = f"{target.name} {target.sign} {', '.join(f'{x:g}' for x in target.limits)}"
        if target.case not in cases:
            lines.append(f"| {name} | | not run | |")
            continue
        rows = list(target.ratios(*cases[target.case], results))
        for backend, found, value in rows:
            lines.append(f"| {name} | {backend} | {found} | {_judged(target, value)} |")
        if not rows:
            lines.append(f"| {name} | | not measured | |")
    return lines


def median(provider: Entry) -> float:
    """Return the milliseconds of a provider's calls."""
    return statistics.median(provider["samples"])


def _judged(target: Target, value: float) -> str:
    """Return which limits were met and which were missed."""
    words: dict[str, list[str]] = {}
    for limit in target.limits:
        met = value >= limit if target.sign == ">=" else value <= limit
        words.setdefault("met" if met else "missed", []).append(f"{limit:g}")
    return "; ".join(f"{word} {', '.join(limits)}" for word, limits in words.items())


def _pairs(case: Entry, floor: str, suffix: str = "") -> Iterator[tuple[str, float, float]]:
    """Yield backend, its time, the time of the floor."""
    times = {one["provider"]: median(one) for one in case["providers"] if one["samples"]}
    for backend in ("triton", "cuda", "cpu"):
        ours, against = f"fastrl {backend}{suffix}", floor.format(backend=backend)
        if ours in times and against in times:
            yield backend, times[ours], times[against]


def _of_copy(passes: float) -> Ratios:
    def ratios(job: str, case: Entry, results: dict[str, Entry]):
        for backend, ours, copy in _pairs(case, "copy"):  # which reads and writes: two passes
            share = 100 * copy * passes / 2 / ours
            yield backend, f"{share:.1f} %", share

    return ratios


def _times(floor: str, suffix: str = "") -> Ratios:
    def ratios(job: str, case: Entry, results: dict[str, Entry]):
        for backend, ours, against in _pairs(case, floor, suffix):
            yield backend, f"{ours / against:.3f}", ours / against

    return ratios


def _fastest_other(job: str, case: Entry, results: dict[str, Entry]):
    """Yield the time of the fastest other library relative to ours; its error is in the table."""
    others = [one for one in case["providers"] if one["kind"] in OTHERS and one["samples"]]
    if others:
        fastest = min(others, key=median)
        for backend, ours, other in _pairs(case, fastest["provider"]):
            yield backend, f"{other / ours:.3f} ({fastest['provider']})", other / ours


def _of_kernels(job: str, case: Entry, results: dict[str, Entry]):
    for backend in ("triton", "cuda", "cpu"):
        graph = results.get(f"graph {job} fastrl {backend}", {}).get("result")
        if graph is not None:
            found = graph["milliseconds"] * 1e3
            yield backend, f"{found:.1f} us", found


_BIG, _FLAT = "8192 x 4096 x 128256", "8192 x 896 x 151936"
_LOGITS = ("8192 x 151936", "bfloat16")
_HEADS = {shape: ("loss and gradients, trained head", shape, "bfloat16") for shape in (_BIG, _FLAT)}
TARGETS = [
    Target(
        "log-probability and entropy, % of copy bandwidth, 8192 x 151936 bf16",
        ("log-probability and entropy", *_LOGITS), _of_copy(1), ">=", (85, 90, 92),
    ),
    Target(
        "loss and gradient from logits, % of 4NV bytes at copy speed, 8192 x 151936 bf16",
        ("loss and gradient", *_LOGITS), _of_copy(2), ">=", (80, 88, 92),
    ),
    Target(
        f"fused linear {_BIG} bf16: fastest other / fastrl",
        _HEADS[_BIG], _fastest_other, ">=", (1,),
    ),
    Target(
        f"fused linear {_FLAT} bf16: fastest other / fastrl",
        _HEADS[_FLAT], _fastest_other, ">=", (1,),
    ),
    Target(
        f"fused linear {_BIG} bf16 / three bare GEMMs",
        _HEADS[_BIG], _times("bare GEMMs"), "<=", (1.15,),
    ),
    Target(
        f"fused linear {_FLAT} bf16 / three bare GEMMs",
        _HEADS[_FLAT], _times("bare GEMMs"), "<=", (1.5,),
    ),
    Target(
        f"float32 weights under bf16 autocast / bf16, {_BIG}",
        _HEADS[_BIG], _times("fastrl {backend}", ", float32 weights, autocast"), "<=", (1.05,),
    ),
    Target(
        "GAE 16 x 131072, us of its kernels",
        ("GAE with a mask", "16 x 131072", "float32"), _of_kernels, "<=", (60, 20, 15),
    ),
]  # fmt: skip
