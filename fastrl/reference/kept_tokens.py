"""The logits of rows that kept a part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_logits(
    logits: Tensor, token_ids: Tensor, kept_ids: Tensor, kept_offsets: Tensor, start: int = 0
) -> Tensor:
    """Return the logits, with -inf for all tokens except a row's kept tokens and its own token.

    A row without kept tokens stays as it is. If the vocabulary is split, `start` is the id of the
    first column.
    """
    vocabulary = logits.shape[-1]
    counts = kept_offsets.to(torch.int64).diff()
    rows = torch.arange(counts.shape[0], device=counts.device)
    row_of = torch.cat([rows.repeat_interleave(counts, output_size=kept_ids.shape[0]), rows])
    column = torch.cat([kept_ids.to(torch.int64), token_ids.reshape(-1)]) - start
    column = torch.where((column >= 0) & (column < vocabulary), column, vocabulary)
    members = (counts == 0)[:, None].repeat(1, vocabulary + 1).reshape(-1)
    members = members.index_fill(0, row_of * (vocabulary + 1) + column, True)
    members = members.reshape(*logits.shape[:-1], vocabulary + 1)[..., :-1]
    return torch.where(members, logits, float("-inf"))
