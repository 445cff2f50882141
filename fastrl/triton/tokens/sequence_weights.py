"""The weight of a valid token in each sequence.

Programs count the valid tokens of a sequence, or of some of its blocks if sequences are few. The
program that finishes last, found by a counter that each call zeroes, adds up these integer counts
and writes the weights.
"""

import torch
import triton
import triton.language as tl

from fastrl.contract import AGGREGATIONS, AggregationArguments
from fastrl.triton.tokens.last_program import count_of_finished, is_last

BLOCK = 2048  # tokens of a program at a time
MOST_PROGRAMS = 512  # with as many sequences, programs do not share them
COUNTS = 1024  # counts that the last program adds at a time
NUM_WARPS = 4

TOKEN_MEAN = tl.constexpr(AGGREGATIONS.index("token-mean"))
SEQ_MEAN_TOKEN_MEAN = tl.constexpr(AGGREGATIONS.index("seq-mean-token-mean"))
SEQ_MEAN_TOKEN_SUM_NORM = tl.constexpr(AGGREGATIONS.index("seq-mean-token-sum-norm"))
TOKEN_SUM = tl.constexpr(AGGREGATIONS.index("token-sum"))
PROMPT_MEAN = tl.constexpr(AGGREGATIONS.index("prompt-mean"))


@triton.jit
def _tokens_of_groups(group, groups, counts, each, COLUMNS: tl.constexpr):
    """Return the valid tokens of these groups; each group has `each` neighboring counts."""
    total = tl.zeros([group.shape[0], COLUMNS], tl.int32)
    for first in range(0, each, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        known = (group < groups)[:, None] & (column < each)
        at = counts + group[:, None].to(tl.int64) * each + column
        total += tl.load(at, mask=known, other=0, cache_modifier=".cg")
    return tl.sum(total, 1)


@triton.jit
def _write_weights(
    counts, weights, normalizer, normalizer_tensor, length_norm, groups, group_size, splits,
    AGGREGATION: tl.constexpr, COUNT_EMPTY: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the weights of all sequences; a group is one sequence except in prompt-mean."""
    SHARED: tl.constexpr = (AGGREGATION == SEQ_MEAN_TOKEN_MEAN) | (AGGREGATION == PROMPT_MEAN)
    each = group_size * splits
    denominator = 1.0
    if AGGREGATION != TOKEN_SUM:
        counted = tl.zeros([GROUPS], tl.int64)
        for first in range(0, groups, GROUPS):
            group = first + tl.arange(0, GROUPS)
            if COUNT_EMPTY:
                counted += (group < groups).to(tl.int64)
            else:
                tokens = _tokens_of_groups(group, groups, counts, each, COLUMNS)
                if AGGREGATION == TOKEN_MEAN:
                    counted += tokens
                else:
                    counted += (tokens > 0).to(tl.int64)
        count = tl.sum(counted, 0)
        denominator = tl.maximum(count, 1).to(tl.float32)
        if normalizer_tensor is not None:
            given = tl.load(normalizer_tensor).to(tl.float32)
            denominator = tl.where(count > 0, given, 1.0)
        else:
            denominator = tl.where(normalizer != 0, normalizer, denominator)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        weight = tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), denominator)
        if AGGREGATION == SEQ_MEAN_TOKEN_SUM_NORM:
            weight = tl.div_rn(weight, length_norm)
        if SHARED:  # by the tokens of the group
            tokens = _tokens_of_groups(group, groups, counts, each, COLUMNS)
            weight = tl.div_rn(weight, tl.maximum(tokens, 1).to(tl.float32))
        for member in range(group_size):
            tl.store(weights + group * group_size + member, weight, mask=group < groups)


@triton.jit(
    do_not_specialize=("ignore_index", "length", "groups", "group_size", "splits"),
    do_not_specialize_on_alignment=("mask", "token_ids", "cu_seqlens", "normalizer_tensor"),
)
def sequence_weights_kernel(
    mask, token_ids, ignore_index: tl.int64, cu_seqlens, length,
    active, counts, finished, weights,
    normalizer, normalizer_tensor, length_norm, groups, group_size, splits,
    AGGREGATION: tl.constexpr, COUNT_EMPTY: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sequence = program // splits
    if cu_seqlens is None:
        begin = sequence * length
        end = begin + length
    else:
        begin = tl.load(cu_seqlens + sequence).to(tl.int64)
        end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(begin + (program - sequence * splits) * BLOCK, end, splits * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < end
        valid = inside & (tl.load(mask + at, mask=inside, other=0) != 0)
        if token_ids is not None:
            valid = valid & (tl.load(token_ids + at, mask=inside, other=0) != ignore_index)
        if active is not None:
            tl.store(active + at, valid, mask=inside)
        found += valid.to(tl.int32)
    tl.store(counts + program, tl.sum(found, 0))
    if is_last(finished):
        _write_weights(
            counts, weights, normalizer, normalizer_tensor, length_norm, groups, group_size,
            splits, AGGREGATION, COUNT_EMPTY, GROUPS, COLUMNS,
        )  # fmt: skip


def sequence_weights(mask, token_ids, ignore_index, cu_seqlens, *aggregation):
    how = AggregationArguments._make(aggregation)
    assert how.group_ids is None, "groups in any order are sorted by torch"
    sequences = mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    merged = token_ids is not None or mask.dtype != torch.bool
    active = mask.new_empty(mask.shape if merged else (0,), dtype=torch.bool)
    weights = mask.new_empty(sequences, dtype=torch.float32)
    if sequences == 0:
        return weights, active
    blocks = triton.cdiv(mask.shape[1], BLOCK)
    splits = max(1, min(blocks, MOST_PROGRAMS // sequences))
    by_prompt = AGGREGATIONS[how.aggregation] == "prompt-mean"
    group_size = how.group_size if by_prompt else 1
    columns = 64 if group_size * splits >= 16 else 1
    sequence_weights_kernel[(sequences * splits,)](
        mask,
        token_ids,
        ignore_index,
        cu_seqlens,
        mask.shape[1],
        active if merged else None,
        mask.new_empty(sequences * splits, dtype=torch.int32),
        count_of_finished(mask.device),
        weights,
        how.normalizer,
        how.normalizer_tensor,
        how.length_norm or float(max(mask.shape[1], 1)),
        sequences // group_size,
        group_size,
        splits,
        AGGREGATION=how.aggregation,
        COUNT_EMPTY=how.count_empty,
        BLOCK=BLOCK,
        GROUPS=COUNTS // columns,
        COLUMNS=columns,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return weights, active
