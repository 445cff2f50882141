"""Inputs of tests: logits, masks, per-token tensors."""

import torch

MASKS = ("all", "none", "random", "one-row-masked", "ragged")


def make_logits(*shape, dtype=torch.float32, std=3.0, token_ids=None, raised=5.0):
    """Random logits `[..., V]`; those of `token_ids` are raised, as in a trained model."""
    logits = torch.randn(*shape) * std
    if token_ids is not None:
        lift = torch.full_like(token_ids, raised, dtype=logits.dtype)[..., None]
        logits.scatter_add_(-1, token_ids[..., None], lift)
    return logits.to(dtype)


def make_mask(kind, B, T):
    """A bool mask `[B, T]` of one of the kinds in MASKS."""
    mask = torch.ones(B, T, dtype=torch.bool)
    if kind == "none":
        mask[:] = False
    elif kind == "random":
        mask = torch.rand(B, T) < 0.6
    elif kind == "one-row-masked":
        mask[B // 2 : B // 2 + 1] = False  # none where there are no rows
    elif kind == "ragged":
        mask = torch.arange(T) < torch.randint(T + 1, (B, 1))
    return mask


def make_logprobs(*shape, dtype=torch.float64):
    return (-torch.rand(shape, dtype=torch.float64) * 3 - 0.01).to(dtype)


def packed(x, lengths):
    """The first `lengths[b]` tokens of each row of `x` `[B, T]`, one after the other: `[N]`."""
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])


def cu_seqlens(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def widest(backend):
    """The widest dtype that a backend takes."""
    return torch.float64 if backend == "reference" else torch.float32
