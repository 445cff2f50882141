"""The sums over tokens that each program stores, and their total by the last program."""

import triton
import triton.language as tl

from fastrl.contract import METRICS

#: Every program stores a row of sums: those of the metrics, those of other terms of the loss, and
#: zeros up to a power of two.
_FIELDS = (*METRICS, "weighted_kl", "weighted_entropy")
ROW = tl.constexpr(triton.next_power_of_2(len(_FIELDS)))
_DOUBLINGS = tl.constexpr(ROW.value.bit_length() - 1)
_METRIC_COUNT = tl.constexpr(len(METRICS))
_UNUSED = tl.constexpr(ROW.value - len(_FIELDS))

_POLICY_LOSS = tl.constexpr(_FIELDS.index("policy_loss"))
_RATIO_MEAN = tl.constexpr(_FIELDS.index("ratio_mean"))
_RATIO_MAX = tl.constexpr(_FIELDS.index("ratio_max"))
_RATIO_MIN = tl.constexpr(_FIELDS.index("ratio_min"))
_ACTIVE_TOKENS = tl.constexpr(_FIELDS.index("active_tokens"))
_WEIGHTED_KL = tl.constexpr(_FIELDS.index("weighted_kl"))
_WEIGHTED_ENTROPY = tl.constexpr(_FIELDS.index("weighted_entropy"))

_ADDED_AT_A_TIME = tl.constexpr(64)  # programs whose rows are added at a time


@triton.jit
def fold(x):
    """Add the neighbors that one thread holds."""
    return tl.sum(tl.reshape(x, [x.shape[0] // 4, 4]), 1)


@triton.jit
def product(x, y):
    """Return a rounded product: a sum of lanes must not take one lane's product unrounded."""
    return tl.fma(x, y, 0.0)


@triton.jit
def fold_max(x):
    """Return the largest of the neighbors that one thread holds."""
    return tl.max(tl.reshape(x, [x.shape[0] // 4, 4]), 1)


@triton.jit
def fold_min(x):
    """Return the smallest of the neighbors that one thread holds."""
    return tl.min(tl.reshape(x, [x.shape[0] // 4, 4]), 1)


@triton.jit
def _halves_joined(columns, half: tl.constexpr):
    """Join each tensor with the one half of the list away."""
    joined = ()
    for i in tl.static_range(half):
        pair = tl.join(columns[i], columns[i + half])
        joined = joined + (pair,)  # type: ignore[assignment]  # noqa: RUF005  Triton cannot unpack
    return joined


@triton.jit
def _stacked(sums, weighted_kl, weighted_entropy):
    """Return a vector for each field as the columns `[N, ROW]` of one tensor."""
    columns = (weighted_kl, weighted_entropy)
    for _ in tl.static_range(_UNUSED):
        columns = columns + (tl.zeros_like(weighted_kl),)  # type: ignore[assignment]  # noqa: RUF005
    columns = sums + columns
    for doubling in tl.static_range(_DOUBLINGS):
        columns = _halves_joined(columns, ROW >> (doubling + 1))
    (whole,) = columns
    return tl.reshape(whole, [weighted_kl.shape[0], ROW])


@triton.jit
def store_sums(partial_sums, program, sums, ratio_max, ratio_min, weighted_kl, weighted_entropy):
    """Store the sums of a program, given as vectors; `sums` are `Metrics` without the extremes."""
    field = tl.arange(0, ROW)
    row = tl.sum(_stacked(sums, weighted_kl, weighted_entropy), 0)
    row = tl.where(field == _RATIO_MAX, tl.max(ratio_max, 0), row)
    row = tl.where(field == _RATIO_MIN, tl.min(ratio_min, 0), row)
    tl.store(partial_sums + program * ROW + field, row)


@triton.jit
def finish(partial_sums, programs, loss_out, metrics, c):
    """Write loss and metrics from the sums of all programs."""
    field = tl.arange(0, ROW)
    sums = tl.zeros([_ADDED_AT_A_TIME, ROW], tl.float32)
    highest = sums - float("inf")
    lowest = sums + float("inf")
    for first in range(0, programs, _ADDED_AT_A_TIME):
        program = first + tl.arange(0, _ADDED_AT_A_TIME)[:, None]
        known = program < programs
        at = partial_sums + program * ROW + field[None, :]
        rows = tl.load(at, mask=known, other=0.0, cache_modifier=".cg")
        sums += rows
        highest = tl.maximum(highest, tl.where(known, rows, -float("inf")))
        lowest = tl.minimum(lowest, tl.where(known, rows, float("inf")))
    total = tl.sum(sums, 0)

    active = tl.sum(tl.where(field == _ACTIVE_TOKENS, total, 0.0), 0)
    # NaN if a ratio is NaN, which the extremes of the programs may have lost
    ratios = tl.sum(tl.where(field == _RATIO_MEAN, total, 0.0), 0)
    extreme = tl.where(field == _RATIO_MAX, tl.max(highest, 0), tl.min(lowest, 0))
    is_extreme = (field == _RATIO_MAX) | (field == _RATIO_MIN)
    is_total = (field == _POLICY_LOSS) | (field == _ACTIVE_TOKENS)
    result = tl.where(
        is_total, total, tl.div_rn(total, tl.zeros_like(total) + tl.maximum(active, 1.0))
    )
    result = tl.where(is_extreme, tl.where(ratios == ratios, extreme, ratios), result)
    result = tl.where(active > 0, result, 0.0)
    tl.store(metrics + field, result, mask=field < _METRIC_COUNT)
    factor = tl.where(field == _POLICY_LOSS, 1.0, 0.0)
    factor = tl.where(field == _WEIGHTED_KL, c.kl_coef, factor)
    factor = tl.where(field == _WEIGHTED_ENTROPY, -c.entropy_coef, factor)
    tl.store(loss_out, tl.sum(tl.where(factor != 0, factor * total, 0.0), 0))
