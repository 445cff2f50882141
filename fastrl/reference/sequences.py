"""Sums over sequences of padded `[B, T]` and packed `[1, N]` tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The sequence to which each token belongs.

    In a padded batch each row is a sequence and `index` is None; in a packed batch `index` `[N]`
    holds the index of each token's sequence. `count` is the number of sequences.
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
        # deterministic on a GPU, unlike index_add
        return zeros.index_put((self.index,), flat, accumulate=True)

    def per_token(self, constant: Tensor, tokens: Tensor) -> Tensor:
        """Expand a constant of the loss, `[S]` or `[B, T]`, to `[B, T]`."""
        return self.spread(constant, tokens) if constant.dim() == 1 else constant

    def spread(self, per_sequence: Tensor, tokens: Tensor) -> Tensor:
        """Expand a value per sequence, `[S]`, to the shape of `tokens`."""
        if self.index is None:
            return per_sequence[:, None].expand(tokens.shape)
        return per_sequence[self.index].reshape(tokens.shape)

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return for each token the masked mean over its sequence (0 if all are masked)."""
        total = self.total(torch.where(mask, x, 0.0))
        count = self.total(mask.to(x.dtype)).clamp(min=1)
        return self.spread(total / count, x)

    def greatest(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return for each token the masked maximum over its sequence (-inf if all are masked)."""
        x = torch.where(mask, x, -torch.inf)
        if x.numel() == 0:
            return x
        if self.index is None:
            return x.amax(-1, keepdim=True).expand(x.shape)
        lowest = x.new_full((self.count,), -torch.inf)
        return self.spread(lowest.scatter_reduce(0, self.index, x.reshape(-1), "amax"), x)


def sequences_of(tokens: Tensor, cu_seqlens: Tensor | None) -> Sequences:
    """Return the sequences of `[B, T]` tokens, or of packed `[1, N]` tokens with `cu_seqlens`."""
    if cu_seqlens is None:
        return Sequences(None, tokens.shape[0])
    positions = torch.arange(tokens.numel(), device=tokens.device, dtype=cu_seqlens.dtype)
    index = torch.bucketize(positions, cu_seqlens[1:], right=True)
    return Sequences(index, cu_seqlens.shape[0] - 1)
