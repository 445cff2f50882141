"""Sums over sequences, for padded `[B, T]` and packed `[1, N]` with `cu_seqlens` alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Which sequence each token of a `[B, T]` tensor belongs to.

    `index` is None for a padded batch (a row is a sequence); for a packed one it holds the number
    of the sequence of each token, `[N]`.
    """

    index: Tensor | None
    count: int

    def total(self, x: Tensor) -> Tensor:
        """Sum over the tokens of each sequence: `[B, T]` -> `[S]`."""
        if self.index is None:
            return x.sum(-1)
        zeros, flat = x.new_zeros(self.count), x.reshape(-1)
        if x.device.type == "cpu":
            return zeros.index_add(0, self.index, flat)
        # sorted and so deterministic on a GPU, where index_add is not
        return zeros.index_put((self.index,), flat, accumulate=True)

    def per_token(self, constant: Tensor, tokens: Tensor) -> Tensor:
        """Return a constant of the loss, `[S]` or `[B, T]`, for each token."""
        return self.spread(constant, tokens) if constant.dim() == 1 else constant

    def spread(self, per_sequence: Tensor, tokens: Tensor) -> Tensor:
        """Give each token the value of its sequence: `[S]` -> the shape of `tokens`."""
        if self.index is None:
            return per_sequence[:, None].expand(tokens.shape)
        return per_sequence[self.index].reshape(tokens.shape)

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """Masked mean of each sequence, spread over its tokens (0 where none is valid)."""
        total = self.total(torch.where(mask, x, 0.0))
        count = self.total(mask.to(x.dtype)).clamp(min=1)
        return self.spread(total / count, x)


def sequences_of(tokens: Tensor, cu_seqlens: Tensor | None) -> Sequences:
    """Return the sequences of a `[B, T]` tensor, or of a packed `[1, N]` one with `cu_seqlens`."""
    if cu_seqlens is None:
        return Sequences(None, tokens.shape[0])
    positions = torch.arange(tokens.numel(), device=tokens.device, dtype=cu_seqlens.dtype)
    index = torch.bucketize(positions, cu_seqlens[1:], right=True)
    return Sequences(index, cu_seqlens.shape[0] - 1)
