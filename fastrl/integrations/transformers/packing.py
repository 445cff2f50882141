"""Rows of sequences without padding, in which sequences may share a prefix.

Only numbers of tokens and places are computed here; no model is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.integrations.transformers.by_sequence import Span

#: A shared prefix has at least this part of the tokens of the longest sequence. Without a prefix,
#: attention needs no mask, which is worth more than the first few tokens of a chat template.
_LEAST = 1 / 16


class Unit(NamedTuple):
    """Sequences that stay together, because they share a prefix, or one sequence."""

    members: tuple[int, ...]  # which sequences
    prefix: int  # the number of tokens in the prefix; any number, such as 0, for one sequence
    own: tuple[int, ...]  # the number of each member's tokens after the prefix, possibly 0

    @property
    def tokens(self) -> int:
        """The number of tokens in a row, in which the prefix lies once."""
        return self.prefix + sum(self.own)


class Part(NamedTuple):
    """Where a sequence lies in a row."""

    sequence: int
    leads: bool  # whether it is the first of its unit; the others find the prefix in place
    prefix: tuple[int, int]  # start and end
    own: tuple[int, int]


class Row(NamedTuple):
    """The sequences in one row of so many tokens."""

    parts: list[Part]
    spans: list[Span]  # which cover the row; none is empty
    tokens: int


def rows_of(units: Iterable[Unit], tokens: int | None = None) -> list[Row]:
    """Pack units into rows, as few as first fit finds.

    Args:
        units: The units. One of more than `tokens` tokens is divided, with its prefix in each part.
        tokens: The most tokens per row; a longer sequence has a row of its own. None: one row.

    Returns:
        The rows.
    """
    bins: list[list[Unit]] = []
    room: list[float] = []
    most = float("inf") if tokens is None else tokens
    divided = (part for unit in units for part in _divided(unit, most))
    for unit in sorted(divided, key=lambda unit: -unit.tokens):
        place = next((i for i, free in enumerate(room) if unit.tokens <= free), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(most)
        bins[place].append(unit)
        room[place] -= unit.tokens
    return [_row(units) for units in bins]


def ranges(first: Tensor, sizes: Tensor) -> Tensor:
    """Return ranges of these sizes, each from its first number on, one after another."""
    before = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum())) + (first - before).repeat_interleave(sizes)


def shared_prefixes(token_ids: Tensor, lengths: list[int]) -> list[Unit]:
    """Find which sequences share which prefix, so that the fewest tokens are computed.

    Each sequence has at most one prefix, and sequences that share one are neighbors in
    lexicographic order. A prefix of less than 1/16 of a sequence is not shared.

    Args:
        token_ids: int64 `[sum(lengths)]` on the CPU, the sequences one after another.
        lengths: Their numbers of tokens. An empty sequence is in no unit.

    Returns:
        The units.
    """
    ids = token_ids.split(lengths)
    order = [i for i in sorted(range(len(ids)), key=lambda i: ids[i].tolist()) if lengths[i]]
    equal = [_common(ids[a], ids[b]) for a, b in itertools.pairwise(order)]
    # of the first n sequences: the most tokens saved, the first and the prefix of the last unit
    best = [(0, 0, 0)]
    for last, sequence in enumerate(order):
        best.append((best[last][0], last, 0))
        shared = longest = lengths[sequence]
        for first in range(last - 1, -1, -1):
            shared, longest = min(shared, equal[first]), max(longest, lengths[order[first]])
            if shared == 0 or shared < _LEAST * longest:
                break
            saved = best[first][0] + shared * (last - first)
            if saved > best[-1][0]:
                best[-1] = (saved, first, shared)
    units: list[Unit] = []
    end = len(order)
    while end:
        _, first, prefix = best[end]
        members = tuple(order[first:end])
        units.append(Unit(members, prefix, tuple(lengths[i] - prefix for i in members)))
        end = first
    return units[::-1]


def _common(one: Tensor, other: Tensor) -> int:
    """Return the number of equal tokens at the beginning."""
    size = min(len(one), len(other))
    differs = (one[:size] != other[:size]).nonzero()
    return int(differs[0]) if len(differs) else size


def _divided(unit: Unit, tokens: float) -> Iterator[Unit]:
    """Yield the unit in parts of at most so many tokens, or of one sequence."""
    first, total = 0, unit.prefix
    for i, own in enumerate(unit.own):
        if i > first and total + own > tokens:
            yield Unit(unit.members[first:i], unit.prefix, unit.own[first:i])
            first, total = i, unit.prefix
        total += own
    yield Unit(unit.members[first:], unit.prefix, unit.own[first:])


def _row(units: list[Unit]) -> Row:
    parts: list[Part] = []
    spans: list[Span] = []
    length = 0
    for unit in units:
        start, end = length, length + unit.prefix
        length = end
        for sequence, own in zip(unit.members, unit.own, strict=True):
            leads = sequence == unit.members[0]
            parts.append(Part(sequence, leads, (start, end), (length, length + own)))
            length += own
            if own and len(unit.members) > 1:
                spans.append(Span(length - own, length, (start, end)))
        spans.append(Span(start, end if len(unit.members) > 1 else length))
    return Row(parts, [span for span in spans if span.end > span.start], length)
