"""Advantages of rewards relative to their group, in one launch; scaled by the batch in two.

A program compares its rewards with every reward that may be in their groups, in any order: three
sweeps (size and largest, mean, deviation) over the neighborhood of the groups if they are
consecutive, or over the whole batch if ids name them. If a batch with ids is too large for that,
torch sorts it first, and the sweeps run over runs of equal ids.

The kernels use no 64-bit floats. A power of two above the sum of its group cuts each reward into a
part whose sums are exact and a tiny rest, so the mean is known beyond float32, and a difference
from it is correct to its own last digits. Nothing may be contracted into an FMA here.
"""

import torch
import triton
import triton.language as tl

from fastrl.contract import BASELINES, SCALES, SINGLETONS

ROWS = 16  # rewards of a program
COLUMNS = 64  # rewards that they are compared with at a time
ALL_PAIRS = 4096  # the largest batch of ids that is not sorted first
ONE_PROGRAM = 16384  # the largest batch whose std is found by one program
BATCH_COLUMNS = 2048  # rewards that this program takes at a time
BATCH_WARPS = 16

LEAVE_ONE_OUT = tl.constexpr(BASELINES.index("leave_one_out"))
NO_BASELINE = tl.constexpr(BASELINES.index("none"))
BY_BATCH = tl.constexpr(SCALES.index("batch"))
NO_SCALE = tl.constexpr(SCALES.index("none"))
BY_MEAN = tl.constexpr(SCALES.index("mean"))

# how the members of a group are found
CONSECUTIVE = tl.constexpr(0)
ANY_ORDER = tl.constexpr(1)
SORTED = tl.constexpr(2)


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _power_of_two(x):
    """Return the largest power of two that is not above x, and its inverse."""
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    return exponent.to(tl.float32, bitcast=True), (0x7F000000 - exponent).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _key(at, group_ids, group_size, limit, MODE: tl.constexpr):
    if MODE == CONSECUTIVE:
        return at // group_size
    else:
        return tl.load(group_ids + at, mask=at < limit, other=0)


@triton.jit
def _reward(at, rewards, order, limit, MODE: tl.constexpr):
    known = at < limit
    if MODE == SORTED:
        at = tl.load(order + at, mask=known, other=0)
    return tl.load(rewards + at, mask=known, other=0.0)


@triton.jit
def _bound(key, group_ids, count, ABOVE: tl.constexpr):
    """Return the place in sorted ids of the first that is not below (ABOVE: above) the key."""
    low = tl.zeros_like(key)
    high = low + count
    while low < high:
        middle = (low + high) // 2
        there = tl.load(group_ids + middle)
        before = there <= key if ABOVE else there < key
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _neighbours(first, last, group_ids, group_size, count, MODE: tl.constexpr):
    """Return where the groups of the rewards `first` to `last` begin and end."""
    if MODE == CONSECUTIVE:
        end = tl.minimum((last // group_size + 1) * group_size, count)
        return first // group_size * group_size, end
    elif MODE == SORTED:
        begin = _bound(tl.load(group_ids + first), group_ids, count, False)
        return begin, _bound(tl.load(group_ids + last), group_ids, count, True)
    else:
        return first * 0, last * 0 + count


@triton.jit
def _mean(high, low, size):
    """Divide a sum in two parts; return the quotient in two parts."""
    mean = tl.div_rn(high, size)
    # mean * size without rounding, after Dekker: halves of the digits multiply exactly
    upper, count = mean * 4097, size * 4097
    upper, count = upper - (upper - mean), count - (count - size)
    lower, few = mean - upper, size - count
    rest = ((high - upper * count) - upper * few) - lower * count - lower * few
    rest = tl.div_rn(rest + low, size)
    rounded = mean + rest
    return rounded, rest - (rounded - mean)


@triton.jit
def _std(squares, size, correction, scale):
    freedom = size - correction
    variance = tl.div_rn(squares, tl.maximum(freedom, 1e-9))
    return tl.where(freedom > 0, tl.sqrt_rn(variance) * scale, 0.0)


@triton.jit
def _known(begin, rewards, group_ids, group_size, count, COLUMNS: tl.constexpr, MODE: tl.constexpr):
    """Return which of COLUMNS rewards belong to a group without NaN and infinities."""
    columns = tl.arange(0, COLUMNS)
    key = _key(begin + columns, group_ids, group_size, count, MODE)
    last = tl.minimum(begin + COLUMNS, count) - 1
    first, end = _neighbours(begin, last, group_ids, group_size, count, MODE)
    spoiled = tl.zeros([COLUMNS], tl.int32)
    for other in range(first, end):
        if ~_finite(tl.load(rewards + other)):
            its_key = other // group_size if MODE == CONSECUTIVE else tl.load(group_ids + other)
            spoiled += (key == its_key).to(tl.int32)
    return (begin + columns < count) & (spoiled == 0)


@triton.jit
def _batch_std(
    rewards, group_ids, group_size, count, correction, COLUMNS: tl.constexpr, MODE: tl.constexpr
):
    """Return the standard deviation of all rewards whose group is finite."""
    columns = tl.arange(0, COLUMNS)
    broken = tl.zeros([COLUMNS], tl.int32)
    for begin in range(0, count, COLUMNS):
        broken += (~_finite(_reward(begin + columns, rewards, None, count, MODE))).to(tl.int32)
    some_broken = tl.sum(broken, 0) > 0
    zero = tl.zeros([COLUMNS], tl.float32)
    sizes, most, uppers, lowers, squares = zero, zero, zero, zero, zero
    size, mean, rest, cut, scale, inverse = 0.0, 0.0, 0.0, 0.0, 1.0, 1.0
    for sweep in tl.static_range(3):
        for begin in range(0, count, COLUMNS):
            x = _reward(begin + columns, rewards, None, count, MODE)
            known = begin + columns < count
            if some_broken:
                known = _known(begin, rewards, group_ids, group_size, count, COLUMNS, MODE)
            x = tl.where(known, x, 0.0)
            if sweep == 0:
                sizes += known.to(tl.float32)
                most = tl.maximum(most, tl.abs(x))
            elif sweep == 1:
                upper = (x + cut) - cut
                uppers += upper
                lowers += x - upper
            else:
                away = tl.where(known, ((x - mean) - rest) * inverse, 0.0)
                squares += away * away
        if sweep == 0:
            size = tl.sum(sizes, 0)
            largest = tl.max(most, 0)
            cut = _power_of_two(largest * size)[0] * 4
            scale, inverse = _power_of_two(largest)
        elif sweep == 1:
            mean, rest = _mean(tl.sum(uppers, 0), tl.sum(lowers, 0), tl.maximum(size, 1.0))
    return _std(tl.sum(squares, 0), size, correction, scale)


# otherwise the code for aligned rewards would add them in another order
@triton.jit(
    do_not_specialize=("count", "group_size"),
    do_not_specialize_on_alignment=("rewards", "group_ids"),
)
def batch_std_kernel(
    rewards, group_ids, batch_std, count, group_size, correction,
    COLUMNS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    std = _batch_std(rewards, group_ids, group_size, count, correction, COLUMNS, MODE)
    tl.store(batch_std, std)


@triton.jit
def group_advantages_kernel(
    rewards,
    group_ids,
    order,
    batch_std,
    advantages,
    means,
    stds,
    informatives,
    count,
    group_size,
    correction,
    eps,
    BASELINE: tl.constexpr,
    SCALE: tl.constexpr,
    RAW: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    inside = rows < count
    x = _reward(rows, rewards, order, count, MODE)
    key = _key(rows, group_ids, group_size, count, MODE)
    last = tl.minimum(first + ROWS, count) - 1
    begin, end = _neighbours(first, last, group_ids, group_size, count, MODE)

    zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    sizes, others, broken, most = zeros, zeros, zeros, zeros
    for near in range(begin, end, COLUMNS):
        y, same = _compared(near, end, key, rewards, group_ids, order, group_size, COLUMNS, MODE)
        sizes += tl.where(same, 1.0, 0.0)
        others += tl.where(same & (y != x[:, None]), 1.0, 0.0)
        broken += tl.where(same & ~_finite(y), 1.0, 0.0)
        most = tl.maximum(most, tl.where(same, tl.abs(y), 0.0))
    size, largest = tl.sum(sizes, 1), tl.max(most, 1)
    mixed, finite = tl.sum(others, 1) > 0, tl.sum(broken, 1) == 0
    scale, inverse = _power_of_two(largest)
    cut = _power_of_two(largest * size)[0] * 4

    uppers, lowers = zeros, zeros
    for near in range(begin, end, COLUMNS):
        y, same = _compared(near, end, key, rewards, group_ids, order, group_size, COLUMNS, MODE)
        upper = (y + cut[:, None]) - cut[:, None]  # sums of these are exact, in any order
        uppers += tl.where(same, upper, 0.0)
        lowers += tl.where(same, y - upper, 0.0)
    mean, rest = _mean(tl.sum(uppers, 1), tl.sum(lowers, 1), tl.maximum(size, 1.0))

    squares = zeros
    for near in range(begin, end, COLUMNS):
        y, same = _compared(near, end, key, rewards, group_ids, order, group_size, COLUMNS, MODE)
        away = ((y - mean[:, None]) - rest[:, None]) * inverse[:, None]
        squares += tl.where(same, away * away, 0.0)
    std = tl.where(mixed, _std(tl.sum(squares, 1), size, correction, scale), 0.0)

    advantage = x
    if BASELINE != NO_BASELINE:
        advantage = tl.where(mixed, (x - mean) - rest, 0.0)
        if BASELINE == LEAVE_ONE_OUT:
            advantage *= tl.div_rn(size, tl.maximum(size - 1, 1.0))
    if SCALE != NO_SCALE:
        divisor = std
        if SCALE == BY_BATCH:
            divisor = tl.zeros_like(std) + tl.load(batch_std)
        elif SCALE == BY_MEAN:
            divisor = tl.where(mixed, mean, x)
        advantage = tl.where(advantage == 0, 0.0, tl.div_rn(advantage, divisor + eps))
    alone = size == 1
    advantage = tl.where(alone, x if RAW else 0.0 * x, advantage)
    informative = tl.where(alone, RAW, mixed)
    nan = float("nan")
    at = rows
    if MODE == SORTED:
        at = tl.load(order + rows, mask=inside, other=0)
    tl.store(advantages + at, tl.where(finite, advantage, nan), mask=inside)
    tl.store(means + at, tl.where(finite, tl.where(mixed, mean, x), nan), mask=inside)
    tl.store(stds + at, tl.where(finite, std, nan), mask=inside)
    tl.store(informatives + at, informative & finite, mask=inside)


@triton.jit
def _compared(
    near, end, key, rewards, group_ids, order, group_size, COLUMNS: tl.constexpr, MODE: tl.constexpr
):  # fmt: skip
    """Return the next rewards, and for each row which of them are in its group."""
    at = near + tl.arange(0, COLUMNS)
    y = _reward(at, rewards, order, end, MODE)
    its_key = _key(at, group_ids, group_size, end, MODE)
    return y[None, :], (key[:, None] == its_key[None, :]) & (at < end)[None, :]


def group_advantages_fwd(
    rewards, group_ids, group_size, baseline, scale, correction, eps, singleton
):
    count = rewards.numel()
    assert count < 2**31 - ROWS, "positions of rewards are 32-bit"
    advantages, means, stds = (torch.empty_like(rewards) for _ in range(3))
    informative = torch.empty_like(rewards, dtype=torch.bool)
    outputs = (advantages, means, stds, informative)
    if count == 0:
        return outputs
    mode, order = CONSECUTIVE, None
    if group_size <= 0:
        mode = ANY_ORDER
        if count > ALL_PAIRS:
            mode = SORTED
            group_ids, order = group_ids.sort()

    if mode == CONSECUTIVE:
        group_ids = None

    def launch(scale, batch_std=None):
        group_advantages_kernel[(triton.cdiv(count, ROWS),)](
            rewards,
            group_ids,
            order,
            batch_std,
            *outputs,
            count,
            group_size,
            correction,
            eps,
            BASELINE=baseline,
            SCALE=scale,
            RAW=SINGLETONS[singleton] == "raw",
            MODE=mode.value,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            enable_fp_fusion=False,
        )

    if SCALES[scale] != "batch":
        launch(scale)
    elif mode == SORTED or count > ONE_PROGRAM:
        launch(NO_SCALE.value)
        launch(scale, _std_of_finite(rewards, means, correction))
    else:
        batch_std = rewards.new_empty(1)
        batch_std_kernel[(1,)](
            rewards,
            group_ids,
            batch_std,
            count,
            group_size,
            correction,
            COLUMNS=BATCH_COLUMNS,
            MODE=mode.value,
            num_warps=BATCH_WARPS,
            enable_fp_fusion=False,
        )
        launch(scale, batch_std)
    return outputs


def _std_of_finite(rewards, means, correction):
    """Return the standard deviation of a large batch, by torch: one program would be too slow."""
    known = means.isfinite()
    size = known.sum()
    x = torch.where(known, rewards, 0.0).double()
    squares = torch.where(known, x - x.sum() / size.clamp(min=1), 0.0).square().sum()
    freedom = size - correction
    return torch.where(freedom > 0, squares / freedom.clamp(min=1e-9), 0.0).sqrt().float()
