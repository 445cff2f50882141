"""The sums over tokens that programs leave, and how the last of them adds these up."""

import torch
import triton
import triton.language as tl

from fastrl.contract import METRICS

PARTS = tl.constexpr(64)  # rows of sums that are added at a time

# A row of sums holds the metrics in their order, and behind them what the loss needs.
RATIO_MEAN = tl.constexpr(METRICS.index("ratio_mean"))
RATIO_MAX = tl.constexpr(METRICS.index("ratio_max"))
RATIO_MIN = tl.constexpr(METRICS.index("ratio_min"))
ACTIVE = tl.constexpr(METRICS.index("active_tokens"))
WEIGHTED_KL = tl.constexpr(12)
WEIGHTED_ENTROPY = tl.constexpr(13)
ROW = tl.constexpr(16)


@triton.jit
def fold(x):
    """Adds neighbours that one thread holds."""
    return tl.sum(tl.reshape(x, [x.shape[0] // 4, 4]), 1)


@triton.jit
def columns(a, b, c, d):
    """Stacks along two new last dimensions."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def finish(parts, programs, finished, loss_out, metrics, c):
    """Adds up the rows of sums, and leaves the count at 0 for the next launch."""
    field = tl.arange(0, ROW)
    sums = tl.zeros([PARTS, ROW], tl.float32)
    highest = sums - float("inf")
    lowest = sums + float("inf")
    for first in range(0, programs, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        known = part < programs
        rows = tl.load(
            parts + part * ROW + field[None, :], mask=known, other=0.0, cache_modifier=".cg"
        )
        sums += rows
        highest = tl.maximum(highest, tl.where(known, rows, -float("inf")))
        lowest = tl.minimum(lowest, tl.where(known, rows, float("inf")))
    total = tl.sum(sums, 0)

    active = tl.sum(tl.where(field == ACTIVE, total, 0.0), 0)
    # NaN where a ratio is, which the extremes of the programs may have lost
    ratios = tl.sum(tl.where(field == RATIO_MEAN, total, 0.0), 0)
    extreme = tl.where(field == RATIO_MAX, tl.max(highest, 0), tl.min(lowest, 0))
    is_extreme = (field == RATIO_MAX) | (field == RATIO_MIN)
    as_it_is = (field == 0) | (field == ACTIVE)
    result = tl.where(as_it_is, total, total / tl.maximum(active, 1.0))
    result = tl.where(is_extreme, tl.where(ratios == ratios, extreme, ratios), result)
    result = tl.where(active > 0, result, 0.0)
    tl.store(metrics + field, result, mask=field < WEIGHTED_KL)
    factor = tl.where(field == 0, 1.0, 0.0)
    factor = tl.where(field == WEIGHTED_KL, c.kl_coef, factor)
    factor = tl.where(field == WEIGHTED_ENTROPY, -c.entropy_coef, factor)
    tl.store(loss_out, tl.sum(tl.where(factor != 0, factor * total, 0.0), 0))
    tl.store(finished, 0)


_counts: dict[tuple[int, int], torch.Tensor] = {}


def count_of_finished(device):
    """A zero that the kernel leaves at zero: one for each stream, one for each captured graph."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counts:
        _counts[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counts[key]
