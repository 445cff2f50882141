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
    """Return the weight of an active token of each sequence, `[S]`; `active` is `[B, T]`.

    A mean over sequences ignores sequences without an active token, unless `count_empty` is set.
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
        # counts each group once: every member contributes 1 / members
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
    """Return the weight of each token, `[B, T]`, 0 at masked tokens."""
    return torch.where(
        active, sequences.spread(sequence_weights(active, sequences, how, dtype), active), 0.0
    )


def _group_index(how: AggregationArguments, count: int, device: torch.device) -> Tensor:
    if how.group_ids is None:
        return torch.arange(count, device=device) // how.group_size
    return dense_index(how.group_ids)


def _denominator(how: AggregationArguments, count: Tensor) -> float | Tensor:
    """The global count if given, else the local one; 1 instead of a local count of 0."""
    if how.normalizer_tensor is not None:
        return torch.where(count > 0, how.normalizer_tensor.reshape(()).to(count.dtype), 1.0)
    return how.normalizer or count.clamp(min=1)
