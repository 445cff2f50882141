"""Inputs like those of training, made on the device from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import fastrl
from fastrl.bench.case import Inputs, Size
from fastrl.bench.error import at, kept_alone, logprobs_of, rows_at_once
from fastrl.bench.models import MODELS

STD = 3.0  # of the logits
MASKED, PACKED, SLICED = "half the rows masked", "packed", "sliced"
AUTOCAST, FROZEN, WITH_TEACHER = "float32 weights, autocast", "frozen head", "with a teacher"
PACKED_SEQUENCES = 64  # in one row


def sequences(size: Size) -> tuple[int, int]:
    """Return sequences and tokens of each: some peers take one advantage per sequence."""
    counts = (1,) if size.variant == PACKED else (8, 2, 1)
    found = next(count for count in counts if size.rows % count == 0)
    return found, size.rows // found


class Source:
    """Random numbers on a device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Return normal numbers."""
        return torch.randn(shape, device=self.device, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers in [0, 1)."""
        return torch.rand(shape, device=self.device, generator=self.generator)

    def integers(self, end: int, *shape: int) -> Tensor:
        """Return integers below ``end``."""
        return torch.randint(end, shape, device=self.device, generator=self.generator)

    def moved(self, x: Tensor, scale: float) -> Tensor:
        """Return numbers like those of ``x``, whose scale is given: of a teacher."""
        return (x.float() + 0.3 * scale * self.normal(*x.shape)).to(x.dtype)


def raised(vocabulary: int, source: Source, *rows: int) -> Tensor:
    """Return logits whose token has a probability between 0.01 and 0.99 among normal ones."""
    log_odds = 9.2 * source.uniform(*rows) - 4.6
    return log_odds + math.log(vocabulary) + STD**2 / 2


def logits_inputs(size: Size, device: torch.device, seed: int) -> Inputs:
    """Return logits with one raised target per row, and what comes with a rollout."""
    source = Source(device, seed)
    vocabulary = MODELS[size.model].vocabulary
    B, T = sequences(size)
    logits = torch.empty(
        B, T + (size.variant == SLICED), vocabulary, dtype=size.dtype, device=device
    )
    logits = logits.normal_(0, STD, generator=source.generator)[:, :T]
    ids = source.integers(vocabulary, B, T)
    target = raised(vocabulary, source, B, T).to(size.dtype)
    logits.scatter_(-1, ids[..., None], target[..., None])
    old = _logprobs(ids, lambda rows: at(logits, rows).float())
    return {"logits": logits, "token_ids": ids} | _rollout(old, size.variant, source)


def linear_inputs(size: Size, device: torch.device, seed: int) -> Inputs:
    """Return hidden states and a head with such logits, and what comes with a rollout."""
    source = Source(device, seed)
    hidden_size, vocabulary = MODELS[size.model]
    B, T = sequences(size)
    weight = source.normal(vocabulary, hidden_size) * (STD / hidden_size**0.5)
    ids = source.integers(vocabulary, B, T)
    hidden, chosen = source.normal(B, T, hidden_size), weight[ids]
    missing = raised(vocabulary, source, B, T) - (hidden * chosen).sum(-1)
    hidden += (missing / chosen.square().sum(-1))[..., None] * chosen
    hidden, weight = hidden.to(size.dtype), weight.to(size.dtype)
    head = weight.float().T
    old = _logprobs(ids, lambda rows: at(hidden, rows).float() @ head)
    if size.variant == AUTOCAST:
        weight = weight.float()
    inputs = {"hidden": hidden, "weight": weight, "token_ids": ids}
    return inputs | _rollout(old, size.variant, source)


def _logprobs(ids: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the log-probability of each token, from a function to the logits of a few rows."""
    found = [logprobs_of(logits(rows), at(ids, rows)) for rows in rows_at_once(ids)]
    return torch.cat(found).view(ids.shape)


def _rollout(logprobs: Tensor, variant: str, source: Source) -> Inputs:
    """Return what comes with a rollout; about one token in forty is clipped."""
    B, T = logprobs.shape
    found: Inputs = {
        "old_logprobs": logprobs + 0.1 * source.normal(B, T),
        "mask": source.uniform(B, T) < (0.5 if variant == MASKED else 1.0),
        "sequence_advantages": source.normal(PACKED_SEQUENCES if variant == PACKED else B),
    }
    found["active"] = int(found["mask"].sum())
    found["advantages"] = found["sequence_advantages"][:, None]
    if variant == PACKED:  # of uneven lengths
        ends = torch.linspace(0, 1, PACKED_SEQUENCES + 1, device=source.device).square() * T
        found["cu_seqlens"] = ends.int()
        lengths = found["cu_seqlens"].diff()
        found["advantages"] = found["sequence_advantages"].repeat_interleave(lengths)[None]
    return found


def with_teacher(size: Size, device: torch.device, seed: int) -> Inputs:
    """Return hidden states and a head, and those of a teacher that is not far from them."""
    inputs, source = linear_inputs(size, device, seed), Source(device, seed + 1000)
    scales = {"hidden": 1.0, "weight": STD / inputs["weight"].shape[1] ** 0.5}
    moved = {name: source.moved(inputs[name], scale) for name, scale in scales.items()}
    return inputs | {f"teacher_{name}": x for name, x in moved.items()}


def with_teacher_logits(size: Size, device: torch.device, seed: int) -> Inputs:
    """Return logits, and those of a teacher that is not far from them."""
    inputs, source = logits_inputs(size, device, seed), Source(device, seed + 1000)
    return inputs | {"teacher_logits": source.moved(inputs["logits"], STD)}


def with_kept(size: Size, device: torch.device, seed: int) -> Inputs:
    """Return what the sampler kept: random tokens and each row's own.

    So a row of the head is seldom read twice.
    """
    inputs, source = linear_inputs(size, device, seed), Source(device, seed + 1000)
    ids, head = inputs["token_ids"], inputs["weight"].float().T
    kept = source.integers(len(inputs["weight"]), *ids.shape, int(size.variant.split()[0]))
    kept[..., 0] = ids
    lists = [[*dict.fromkeys(row)] for row in kept.flatten(0, 1).tolist()]
    sets = fastrl.KeptTokens.from_lists(lists, device=device)
    old = _logprobs(
        ids, lambda rows: kept_alone(at(inputs["hidden"], rows).float() @ head, at(kept, rows))
    )
    noise = 0.1 * source.normal(*ids.shape)
    return inputs | {"kept_ids": kept, "kept": sets, "old_logprobs": old + noise}
