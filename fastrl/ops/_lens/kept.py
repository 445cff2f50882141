"""The tokens that each row kept, as columns of a small matrix of logits.

The kept logits of a row form a row over a small vocabulary, so the kernels for rows of logits need
not know about the other tokens. Rows with similar numbers of kept tokens form a chunk `[C, K]`,
padded with logits of -inf.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.checks import can_read
from fastrl.ops._arguments import KeptArguments
from fastrl.ops._vocabulary_parts.parts import VocabularyParts

#: The number of tokens of a row that has the whole vocabulary: similar to no other number.
WHOLE_ROW = 2**31
#: A chunk has rows of up to twice the tokens of its first row, plus this many.
_SIMILAR = 16


class KeptColumns(NamedTuple):
    """The columns of a chunk of rows."""

    ids: Tensor  # int32 [C, K]; -1: none
    place: Tensor  # int64 [C], the column of the row's token; -1: the token is unknown


class Columns(NamedTuple):
    """The kept columns of a chunk of rows."""

    ids: Tensor  # integers [C, K] of this rank's part; -1: none
    width: int


class KeptRows(NamedTuple):
    """The tokens that rows `[N]` kept."""

    ids: Tensor  # [M]
    starts: Tensor  # [N], in `ids`
    counts: Tensor  # [N]; 0: the whole vocabulary
    lacking: Tensor  # bool [N]: the set lacks the row's own token, which is still a member
    vocabulary: int

    @classmethod
    def of(cls, kept: KeptArguments, token_ids: Tensor, vocabulary: int) -> KeptRows:
        """Return the sets of rows with these tokens `[N]`."""
        assert kept.ids is not None
        assert kept.offsets is not None
        ids, offsets = kept.ids, kept.offsets.to(torch.int64)
        counts = offsets.diff()
        rows = torch.arange(counts.shape[0], device=counts.device)
        row_of = rows.repeat_interleave(counts, output_size=ids.shape[0])
        hits = torch.nn.functional.pad((ids == token_ids[row_of]).cumsum(0), (1, 0))
        found = hits[offsets[1:]] > hits[offsets[:-1]]
        known = (token_ids >= 0) & (token_ids < vocabulary)
        return cls(ids, offsets[:-1], counts, (counts > 0) & known & ~found, vocabulary)

    def widths(self) -> Tensor:
        """Return how many tokens each row has, or `WHOLE_ROW`."""
        return torch.where(self.counts > 0, self.counts + self.lacking, WHOLE_ROW)

    def taken(self, rows: Tensor | slice) -> KeptRows:
        """Index the rows."""
        return self._replace(
            starts=self.starts[rows], counts=self.counts[rows], lacking=self.lacking[rows]
        )

    def columns(self, token_ids: Tensor, width: int) -> KeptColumns:
        """Return the columns of rows with these tokens, padded to `width`."""
        place = torch.arange(width, device=token_ids.device)
        entries = (self.starts[:, None] + place).clamp_(0, self.ids.shape[0] - 1)
        own = token_ids[:, None]
        ids = torch.where(place < self.counts[:, None], self.ids[entries].to(torch.int64), -1)
        ids = torch.where((place == self.counts[:, None]) & self.lacking[:, None], own, ids)
        # on a GPU the values have not been checked
        ids = torch.where((ids >= 0) & (ids < self.vocabulary), ids, -1)
        found = (ids == own) & (own >= 0)
        places = torch.where(found.any(1), found.int().argmax(1), -1)
        return KeptColumns(ids.to(torch.int32), places)


def check_offsets(ids: Tensor, offsets: Tensor, name: str = "kept") -> None:
    """Raise on a CPU if offsets `[N + 1]` do not fit the ids."""
    if not can_read(offsets):
        return
    total, counts = ids.shape[0], offsets.to(torch.int64).diff()
    if int(offsets[0]) != 0 or int(offsets[-1]) != total or bool((counts < 0).any()):
        ends = f"{int(offsets[0])} ... {int(offsets[-1])}"
        raise ValueError(
            f"{name}.offsets must rise from 0 to the number of ids {total}, got "
            f"{offsets.tolist() if offsets.numel() <= 16 else ends}"
        )


def check_kept(kept: KeptArguments, active: Tensor, vocabulary: int) -> None:
    """Raise on a CPU if offsets do not fit, or if an active row `[N]` has wrong ids."""
    ids, offsets = kept
    if ids is None or offsets is None or not (can_read(ids) and can_read(offsets)):
        return
    check_offsets(ids, offsets)
    counts = offsets.to(torch.int64).diff()
    row_of = torch.arange(counts.shape[0]).repeat_interleave(counts)
    counted = active[row_of]
    wrong = counted & ((ids < 0) | (ids >= vocabulary))
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"kept.token_ids must lie in [0, {vocabulary}), got {int(ids[first])} in the set of "
            f"row {int(row_of[first])}"
        )
    keys = (row_of * vocabulary + ids)[counted].sort().values
    repeated = keys[1:] == keys[:-1]
    if bool(repeated.any()):
        row, token = divmod(int(keys[1:][repeated][0]), vocabulary)
        raise ValueError(
            f"kept.token_ids must not repeat an id within a set, got id {token} twice in row {row}"
        )


def ids_of_part(columns: KeptColumns, parts: VocabularyParts) -> Tensor:
    """Return the ids `[C, K]` of the columns in this rank's part, counted from its start."""
    if not parts.split():
        return columns.ids
    start, size = parts.start(), parts.sizes[parts.rank]
    own = (columns.ids >= start) & (columns.ids < start + size)
    return torch.where(own, columns.ids - start, -1)


def similar(widths: Sequence[int], start: int, count: int) -> Iterator[slice]:
    """Split rows, which are sorted by width, wherever the width becomes much larger."""
    end = start + count
    while start < end:
        stop = bisect_right(widths, 2 * widths[start] + _SIMILAR, start, end)
        yield slice(start, stop)
        start = stop
