"""The layout of the tokens of a case: shape, sequences, mask."""

from __future__ import annotations

import dataclasses

import numpy as np

from .case import Case


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens in a row: which sequence each belongs to, and which are valid."""

    shape: tuple[int, ...]  # [B, T], or packed [N]; of means [], [B, 2, T]
    sequence: np.ndarray  # [N]
    count: int  # sequences
    bounds: np.ndarray | None  # cu_seqlens
    mask: np.ndarray | None  # [N]; None: the call gets none
    valid: np.ndarray  # [N]

    @property
    def packed(self) -> bool:
        return len(self.shape) == 1

    @property
    def total(self) -> int:
        return len(self.sequence)


def tokens_of(case: Case) -> Tokens:
    """Return the tokens of a case."""
    random = case.random("tokens")
    if case.layout == "padded":
        shape, count, bounds = (case.sequences, case.tokens), case.sequences, None
        sequence = np.repeat(np.arange(count), case.tokens)
    elif case.layout == "0-d":
        shape, count, bounds, sequence = (), 1, None, np.zeros(1, int)
    elif case.layout == "3-d":
        shape, count, bounds = (case.sequences, 2, case.tokens), case.sequences, None
        sequence = np.repeat(np.arange(count), 2 * case.tokens)
    elif case.layout == "packed":
        shape, count, bounds = (case.sequences * case.tokens,), 1, None
        sequence = np.zeros(shape, int)
    else:
        lengths = random.integers(0, case.tokens + 1, case.sequences)
        count, shape = case.sequences, (int(lengths.sum()),)
        bounds = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
        sequence = np.repeat(np.arange(count), lengths)
    mask = _mask(case, random, sequence, count)
    valid = np.ones(len(sequence), bool) if mask is None else mask
    return Tokens(shape, sequence, count, bounds, mask, valid)


def _mask(
    case: Case, random: np.random.Generator, sequence: np.ndarray, count: int
) -> np.ndarray | None:
    total = len(sequence)
    if case.mask == "absent":
        return None
    if case.mask in ("all", "none"):
        return np.full(total, case.mask == "all")
    if case.mask == "one":
        mask = np.zeros(total, bool)
        mask[random.integers(0, max(total, 1), 1 if total else 0)] = True
        return mask
    place = np.arange(total) - np.searchsorted(sequence, sequence)
    if case.mask == "ragged":  # sequences end early, some before they begin
        lengths = np.bincount(sequence, minlength=count)
        return place < random.integers(0, lengths + 1)[sequence]
    if case.mask == "holes":
        return random.random(total) < 0.6
    if case.mask == "without-first":  # an empty sequence, and a prompt in front of the others
        return (sequence > 0) & (place >= random.integers(0, 3, count)[sequence])
    raise ValueError(f"no mask {case.mask}")
