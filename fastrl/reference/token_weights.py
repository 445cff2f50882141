"""The weight w_t of every token in the loss: what the aggregation names mean."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.reference.groups import dense_index, group_sum
from fastrl.reference.sequences import Sequences


def token_weights(
    mask: Tensor,
    sequences: Sequences,
    *,
    aggregation: str,
    normalizer: float | Tensor | None = None,
    length_norm: float | None = None,
    groups: Tensor | None = None,
    count_empty: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return w_t `[B, T]`, 0 at masked tokens; `groups` is the group number of each sequence.

    `count_empty` says whether sequences without a valid token count in a mean over sequences.
    """
    valid = mask.to(dtype)
    if aggregation == "token-sum":
        return valid
    if aggregation == "token-mean":
        return valid / _denominator(normalizer, valid.sum())
    lengths = sequences.total(valid)
    if aggregation == "prompt-mean":
        assert groups is not None
        index = dense_index(groups)
        group_tokens = group_sum(lengths, index)
        members = group_sum(torch.ones_like(lengths), index)
        # each group is counted once: a share of 1 / members from every member
        count = torch.where(group_tokens > 0, 1 / members, 0.0).sum().round()
        share = sequences.spread(1 / group_tokens.clamp(min=1), valid)
        return valid * share / _denominator(normalizer, count)
    counted = torch.ones_like(lengths) if count_empty else (lengths > 0).to(dtype)
    weights = valid / _denominator(normalizer, counted.sum())
    if aggregation == "seq-mean-token-mean":
        return weights / sequences.spread(lengths.clamp(min=1), valid)
    if aggregation == "seq-mean-token-sum-norm":
        assert length_norm is not None
        return weights / length_norm
    return weights


def _denominator(normalizer: float | Tensor | None, count: Tensor) -> float | Tensor:
    """The global count where given, else the local one; where nothing is valid divide by 1."""
    if normalizer is None:
        return count.clamp(min=1)
    return torch.where(count > 0, normalizer, 1.0) if isinstance(normalizer, Tensor) else normalizer
