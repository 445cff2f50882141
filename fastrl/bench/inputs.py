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


def raised(vocabulary: int, source: Source, *rows: int) -> Tensor:
    """Return logits whose token has a probability between 0.01 and 0.99 among normal ones."""
    log_odds = 9.2 * source.uniform(*rows) - 4.6
    return log_odds + math.log(vocabulary) + STD**2 / 2


def vocabulary_inputs(size: Size, device: torch.device, seed: int) -> Inputs:
    """Return logits, or hidden states and a head, with what an operator and a variant take."""
    make = _linear_inputs if size.op.startswith("linear") else _logits_inputs
    found = make(size, device, seed)
    if size.op.endswith("divergence") or size.variant == WITH_TEACHER:
        return found | _teacher(found, Source(device, seed + 1000))
    if size.variant.endswith("kept"):
        count = int(size.variant.split()[0])
        return found | _kept(found, count, Source(device, seed + 1000))
    return found


def _logits_inputs(size: Size, device: torch.device, seed: int) -> Inputs:
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


def _linear_inputs(size: Size, device: torch.device, seed: int) -> Inputs:
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


def _teacher(inputs: Inputs, source: Source) -> Inputs:
    """Return the logits, or hidden states and head, of a teacher that is not far from these."""
    scales = {"logits": STD, "hidden": 1.0}
    if "weight" in inputs:
        scales["weight"] = STD / inputs["weight"].shape[1] ** 0.5
    return {
        f"teacher_{name}": (x.float() + 0.3 * scale * source.normal(*x.shape)).to(x.dtype)
        for name, scale in scales.items()
        if (x := inputs.get(name)) is not None
    }


def _kept(inputs: Inputs, count: int, source: Source) -> Inputs:
    """Return tokens that the sampler kept: random ones, so that none is read twice, and its own."""
    ids, head = inputs["token_ids"], inputs["weight"].float().T
    kept = source.integers(len(inputs["weight"]), *ids.shape, count)
    kept[..., 0] = ids
    lists = [[*dict.fromkeys(row)] for row in kept.flatten(0, 1).tolist()]
    sets = fastrl.KeptTokens.from_lists(lists, device=source.device)
    old = _logprobs(
        ids, lambda rows: kept_alone(at(inputs["hidden"], rows).float() @ head, at(kept, rows))
    )
    noise = 0.1 * source.normal(*ids.shape)
    return {"kept_ids": kept, "kept": sets, "old_logprobs": old + noise}
