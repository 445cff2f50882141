"""The weight of every token in the loss: what the names of the aggregations mean."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.contract import AGGREGATIONS, AggregationArguments
from fastrl.reference.groups import dense_index, group_sum
from fastrl.reference.sequences import Sequences


def sequence_weights(
    active: Tensor,
    sequences: Sequences,
    how: AggregationArguments,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weight of a valid token of each sequence, `[S]`; `active` `[B, T]` says which are.

    Without `count_empty` sequences without a valid token do not count in a mean over sequences.
    """
    lengths = sequences.total(active.to(dtype))
    ones = torch.ones_like(lengths)
    name = AGGREGATIONS[how.aggregation]
    if name == "token-sum":
        return ones
    if name == "token-mean":
        return ones / _denominator(how, lengths.sum())
    if name == "prompt-mean":
        index = _group_index(how, sequences.count, active.device)
        group_tokens = group_sum(lengths, index)
        members = group_sum(ones, index)
        # each group is counted once: a share of 1 / members from every member
        count = torch.where(group_tokens > 0, 1 / members, 0.0).sum().round()
        return 1 / group_tokens.clamp(min=1) / _denominator(how, count)
    counted = ones if how.count_empty else (lengths > 0).to(dtype)
    weights = ones / _denominator(how, counted.sum())
    if name == "seq-mean-token-mean":
        return weights / lengths.clamp(min=1)
    if name == "seq-mean-token-sum-norm":
        return weights / (how.length_norm or float(max(active.shape[1], 1)))
    return weights


def token_weights(
    active: Tensor,
    sequences: Sequences,
    how: AggregationArguments,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return w_t `[B, T]`, 0 at masked tokens."""
    return torch.where(
        active, sequences.spread(sequence_weights(active, sequences, how, dtype), active), 0.0
    )


def _group_index(how: AggregationArguments, count: int, device: torch.device) -> Tensor:
    if how.group_ids is None:
        return torch.arange(count, device=device) // how.group_size
    return dense_index(how.group_ids)


def _denominator(how: AggregationArguments, count: Tensor) -> float | Tensor:
    """The global count where given, else the local one; where nothing is valid divide by 1."""
    if how.normalizer_tensor is not None:
        return torch.where(count > 0, how.normalizer_tensor.reshape(()).to(count.dtype), 1.0)
    return how.normalizer or count.clamp(min=1)
