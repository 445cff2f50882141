"""The weights of tokens in the loss: the definition of every aggregation."""

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
    """Return the weight of an active token in each sequence, `[S]`; `active` is `[B, T]`.

    A mean over sequences ignores sequences without an active token, unless `count_empty` is set.
    """
    lengths = sequences.total(active.to(dtype))
    ones = torch.ones_like(lengths)
    name = AGGREGATIONS[how.aggregation]
    if name == "token-sum":
        return ones
    weights = ones / _denominator(how, _count(lengths, how))
    if name == "prompt-mean":
        return weights / group_sum(lengths, _group_index(how, lengths)).clamp(min=1)
    if name == "seq-mean-token-mean":
        return weights / lengths.clamp(min=1)
    if name == "seq-mean-token-sum-norm":
        return weights / (how.length_norm or float(max(active.shape[1], 1)))
    return weights


def local_count(active: Tensor, sequences: Sequences, how: AggregationArguments) -> Tensor:
    """Return the count that a normalizer replaces, in float64: tokens, sequences or groups."""
    return _count(sequences.total(active.double()), how)


def token_weights(
    active: Tensor,
    sequences: Sequences,
    how: AggregationArguments,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weight of each token, `[B, T]`, 0 at masked tokens."""
    return torch.where(
        active, sequences.spread(sequence_weights(active, sequences, how, dtype), active), 0.0
    )


def _count(lengths: Tensor, how: AggregationArguments) -> Tensor:
    """Return the number of tokens, sequences or groups, from the lengths of the sequences."""
    name = AGGREGATIONS[how.aggregation]
    if name == "token-mean":
        return lengths.sum()
    if name == "prompt-mean":
        index = _group_index(how, lengths)
        members = group_sum(torch.ones_like(lengths), index)
        # counts each group once: every member contributes 1 / members
        return torch.where(group_sum(lengths, index) > 0, 1 / members, 0.0).sum().round()
    return (torch.ones_like(lengths) if how.count_empty else (lengths > 0).to(lengths.dtype)).sum()


def _group_index(how: AggregationArguments, lengths: Tensor) -> Tensor:
    if how.group_ids is None:
        return torch.arange(lengths.shape[0], device=lengths.device) // how.group_size
    return dense_index(how.group_ids)


def _denominator(how: AggregationArguments, count: Tensor) -> float | Tensor:
    """Return the global count if given, else the local one, or 1 for a local count of 0."""
    if how.normalizer_tensor is not None:
        return torch.where(count > 0, how.normalizer_tensor.reshape(()).to(count.dtype), 1.0)
    return how.normalizer or count.clamp(min=1)
