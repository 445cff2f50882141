"""The predicted time of the cases of bench/gpu.py, beside the measured one in its report.

    python bench/gpu_predictions.py        # for an H100, before anything is measured

Every kernel on logits is bound by memory (`make targets`), so its prediction is the bytes that it
moves over the copy rate, which a run measures first: per active logit of s bytes

    log-probability and entropy              s
    the same and their gradients             3 s
    loss and gradient, CUDA                  2 s      a row waits in shared memory
    loss and gradient, Triton                2 to 3 s by how much of the second reading is in cache
    loss and gradient, a factor other than 1 2 s more

and s of each logit of a masked row that has a gradient to zero: the bytes that a case counts, and
what is read again. The share of a second reading that
comes from memory is what the rows in flight, two per multiprocessor, exceed the cache by. Linear
forms are linear_prediction.py with the rates of this machine, the bytes per logit of a chunk being
6 for CUDA and 6 to 10 for Triton. Ops on tokens take per token

    GAE                                      17 bytes; Triton 26, in two sweeps, of long sequences
    policy loss and gradient, token level    14, the mask being counted first
    the same, sequence level                 32, in three sweeps, by one program per sequence
    group advantages                         17, and 25 with ids

at the copy rate, of which a multiprocessor alone has at most twice its share. What fits into the
cache in all is read from there the second time. Each launch adds LAUNCH, those of torch included;
small cases are compared with the time of their kernels alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gpu_linear import TRAINED
from gpu_logits import STATS_GRADIENT
from gpu_targets import Entry, median
from linear_prediction import H100, Rates, chunk_rows, chunk_seconds, predicted

LAUNCH = 3e-6  # seconds between the starts of two small kernels in a graph, an assumption
RESIDENT = 2  # rows in flight on a multiprocessor
APART = 0.2  # of the prediction: a difference with a cause that has to be found
GAE_CHUNK = 2048  # tokens of a program of Triton's: longer sequences take two launches
ALONE = 2.0  # share of the copy rate, in its own shares, that a multiprocessor has alone
#: Launches of a call, where it has a gradient with those of torch around it.
LAUNCHES = {
    "token_stats": 1,
    "logits_policy_loss": 8,
    "policy_loss": 6,
    "gae": 2,
    "group_advantages": 1,
}
#: What a run would measure of an H100, as far as the models need it.
MACHINE = {"copy TB/s": H100.bytes / 1e12, "multiprocessors": 132, "cache MB": 52.4}


def predictions(results: dict[str, Entry]) -> list[str]:
    """Return the table of what was predicted and what was measured."""
    machine = results.get("anchors", {}).get("result")
    lines = ["### Predictions", ""]
    if machine is None:
        return [*lines, "No copy rate was measured."]
    lines += ["| case | provider | predicted | measured | measured / predicted | |"]
    lines += ["| --- | --- | ---: | ---: | ---: | --- |"]
    for job, one in results.items():
        if job.isdigit() and "result" in one:
            for provider, expected, took in _pairs(job, one["result"], machine, results):
                ratio = took / expected
                apart = "apart" if abs(ratio - 1) > APART else ""
                times = f"{_in_words(expected)} | {_in_words(took)} | {ratio:.2f} | {apart}"
                case = one["result"]
                lines.append(f"| {case['label']}: {case['work']} | {provider} | {times} |")
    return lines


def _in_words(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _pairs(
    job: str, case: Entry, machine: dict[str, Any], results: dict[str, Entry]
) -> Iterator[tuple[str, float, float]]:
    """Yield a provider of fastrl with its predicted and its measured seconds."""
    for one in case["providers"]:
        if not one["samples"] or not one["provider"].startswith(("fastrl triton", "fastrl cuda")):
            continue
        took = median(one) / 1e3
        if case["small"]:
            graph = results.get(f"graph {job} {one['provider']}", {}).get("result")
            if graph is None:
                continue
            took = graph["milliseconds"] / 1e3
        yield one["provider"], seconds(case, one["provider"], machine), took


def seconds(case: Entry, provider: str, machine: dict[str, Any]) -> float:
    """Return the predicted seconds of a call."""
    sizes = [int(size) for size in case["shape"].split(" x ")]
    if case["op"].startswith("linear_"):
        return _linear(case, provider, machine, *sizes)
    rate, moved = machine["copy TB/s"] * 1e12, case["bytes_moved"]
    launches = 8 if STATS_GRADIENT in case["work"] else LAUNCHES[case["op"]]
    if case["op"] == "logits_policy_loss":
        moved += _logits_again(case, provider, machine, *sizes)
    elif case["op"] == "gae" and "triton" in provider and sizes[1] > GAE_CHUNK:
        second_sweep = 9 * sizes[0] * sizes[1]
        moved += max(0.0, second_sweep - machine["cache MB"] * 1e6)
    elif "sequence level" in case["work"]:  # two more sweeps
        moved += 2 * 9 * sizes[0] * sizes[1]
        rate *= min(1.0, ALONE * sizes[0] / machine["multiprocessors"])
    return moved / rate + launches * LAUNCH


def _logits_again(
    case: Entry, provider: str, machine: dict[str, Any], rows: int, vocabulary: int
) -> float:
    """Return the bytes beyond one reading of the logits and one writing of their gradient."""
    row = vocabulary * getattr(torch, case["dtype"]).itemsize
    found = 0.0
    if "triton" in provider:
        found += rows * case["density"] * row * second_reading(machine, rows, row)
    return found + (2 * rows * row if "half the loss" in provider else 0.0)


def second_reading(machine: dict[str, Any], rows: int, row_bytes: int) -> float:
    """Return the share of a second sweep over rows that comes from memory, not from the cache."""
    in_flight = min(rows, RESIDENT * machine["multiprocessors"]) * row_bytes
    return max(0.0, 1 - machine["cache MB"] * 1e6 / in_flight)


def _linear(
    case: Entry, provider: str, machine: dict[str, Any], rows: int, width: int, vocabulary: int
) -> float:
    rates = Rates(_gemm_rate(machine, width, vocabulary), machine["copy TB/s"] * 1e12)
    trained = case["op"] != "linear_policy_loss" or TRAINED in case["work"]
    active = round(rows * case["density"])
    chunk = chunk_rows(width, vocabulary, trained=trained)
    again = second_reading(machine, min(active, chunk), 4 * vocabulary)
    moved = 6 + (4 * again if "triton" in provider else 0.0)
    if case["op"] == "linear_policy_loss":
        found = predicted(active, width, vocabulary, chunk, moved, trained=trained, rates=rates)
        # the finished gradients are multiplied
        scaled = 4 * (active * width + (vocabulary * width if trained else 0))
        return found + (scaled / rates.bytes if "half the loss" in provider else 0.0)
    projected = chunk_seconds(active, width, vocabulary, first=True, rates=rates).projection
    scored = projected + 4 * active * vocabulary / rates.bytes
    if case["work"] == "scoring":
        return scored
    # the backward projects again, reads the logits once, and writes their gradient
    return scored + predicted(active, width, vocabulary, chunk, 6, rates=rates)


def _gemm_rate(machine: dict[str, Any], width: int, vocabulary: int) -> float:
    """Return the measured FLOP/s of a GEMM of this head, or else of the fastest."""
    rates = {name: rate for name, rate in machine.items() if name.endswith("TFLOP/s")}
    of_head = [rate for name, rate in rates.items() if f" x {vocabulary} x {width} " in name]
    return 1e12 * (of_head[0] if of_head else max(rates.values(), default=H100.flops / 1e12))


def main() -> None:
    from gpu_cases import SHAPES, items

    print(f"{MACHINE}, GEMMs {H100.flops / 1e12:g} TFLOP/s\n")
    print("| case | Triton | CUDA |")
    print("| --- | ---: | ---: |")
    for item in items(SHAPES["gpu"], torch.device("cuda")):
        case = item.make()
        entry = {name: getattr(case, name) for name in ("op", "work", "shape", "bytes_moved")}
        entry |= {"dtype": str(case.dtype).removeprefix("torch."), "density": item.density}
        times = [seconds(entry, f"fastrl {backend}", MACHINE) for backend in ("triton", "cuda")]
        cells = " | ".join(map(_in_words, times))
        print(f"| {case.label}: {case.work} | {cells} |")


if __name__ == "__main__":
    main()
