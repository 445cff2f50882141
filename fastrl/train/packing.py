"""Micro-batches by tokens: sequences packed into rows without padding."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.train.attention import Layout, Span, make_layout
from fastrl.train.rollout import Rollout


class PackedBatch(NamedTuple):
    """S completions and their prompts in one row of L tokens; n of the tokens are scored.

    The last token of a completion is predicted and predicts nothing, so it is not in the row.
    """

    input_ids: Tensor  # [1, L]
    position_ids: Tensor  # [1, L], which restart with each sequence
    layout: Layout
    predictors: Tensor  # [n], the place in the row of the token before each scored token
    token_ids: Tensor  # [n], the scored tokens
    cu_seqlens: Tensor  # [S + 1], int32: where the scored tokens of each completion begin
    rows: Tensor  # [S], the completions in the rollout
    mask: Tensor  # bool [S, T], which of their tokens are scored

    def take(self, values: Tensor) -> Tensor:
        """Values ``[n]`` at the scored tokens, of values ``[N, T]`` of the rollout."""
        return values[self.rows][self.mask]

    def put(self, values: Tensor, into: Tensor) -> None:
        """Write values ``[n]`` of the scored tokens into values ``[N, T]`` of the rollout."""
        part = into[self.rows]
        part[self.mask] = values
        into[self.rows] = part


class _Unit(NamedTuple):
    """Completions that share their prompt, or one completion with its prompt."""

    prompt: int
    rows: list[int]
    tokens: int


def micro_batches(
    rollout: Rollout,
    rows: Tensor,
    mask: Tensor,
    *,
    tokens: int,
    share_prompts: bool = False,
) -> Iterator[PackedBatch]:
    """Pack completions into as few rows of at most ``tokens`` tokens as first fit finds.

    Args:
        rollout: The completions.
        rows: Indices of those to pack.
        mask: Bool ``[N, T]``, which tokens are scored: the first tokens of a completion. A
            completion without any is left out.
        tokens: Tokens per row. A longer sequence has a row of its own.
        share_prompts: Whether completions of one prompt in one row share its tokens.
    """
    lengths = mask.sum(1).tolist()
    prompt_of = rollout.prompt_of.tolist()
    sequences = {row: lengths[row] for row in rows.tolist() if lengths[row]}
    units: list[_Unit] = []
    for row, length in sequences.items():
        prompt = len(rollout.prompts[prompt_of[row]])
        units.append(_Unit(prompt_of[row], [row], prompt + length - 1))
    if share_prompts:
        units = list(_shared(units, rollout, tokens))
    for packed in _first_fit(units, tokens):
        yield _pack(rollout, packed, mask, lengths)


def _shared(units: list[_Unit], rollout: Rollout, tokens: int) -> Iterator[_Unit]:
    """Join the units of a prompt, up to ``tokens``."""
    of_prompt: dict[int, list[_Unit]] = {}
    for unit in units:
        of_prompt.setdefault(unit.prompt, []).append(unit)
    for prompt, parts in of_prompt.items():
        joined: _Unit | None = None
        for part in parts:
            if joined is None:
                joined = part
                continue
            total = joined.tokens + part.tokens - len(rollout.prompts[prompt])
            if total > tokens:
                yield joined
                joined = part
            else:
                joined = _Unit(prompt, joined.rows + part.rows, total)
        if joined is not None:
            yield joined


def _first_fit(units: list[_Unit], tokens: int) -> list[list[_Unit]]:
    """The units in bins, the largest first, each in the first bin with enough room."""
    bins: list[list[_Unit]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda unit: -unit.tokens):
        place = next((i for i, free in enumerate(room) if unit.tokens <= free), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(tokens)
        bins[place].append(unit)
        room[place] -= unit.tokens
    return bins


def _pack(rollout: Rollout, units: list[_Unit], mask: Tensor, lengths: list[int]) -> PackedBatch:
    device = mask.device
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    predictors: list[Tensor] = []
    spans: list[Span] = []
    start = 0
    for unit in units:
        prompt = torch.tensor(rollout.prompts[unit.prompt], device=device)
        size, shared = len(prompt), (0, 0)
        if len(unit.rows) > 1:
            shared = (start, start + size)
            spans.append(Span(*shared))
            ids.append(prompt)
            positions.append(torch.arange(size))
            start += size
        for row in unit.rows:
            own = rollout.token_ids[row, : lengths[row] - 1]
            if len(unit.rows) > 1:
                first = torch.tensor([shared[1] - 1])
                end = start + len(own)
                positions.append(torch.arange(size, size + len(own)))
                if end > start:
                    spans.append(Span(start, end, shared))
                after = torch.arange(start, end)
            else:
                ids.append(prompt)
                first = torch.tensor([start + size - 1])
                end = start + size + len(own)
                positions.append(torch.arange(end - start))
                spans.append(Span(start, end))
                after = torch.arange(start + size, end)
            ids.append(own)
            predictors += [first, after]
            start = end
    rows = torch.tensor([row for unit in units for row in unit.rows], device=device)
    scored = mask[rows]
    counts = torch.tensor([0] + [lengths[row] for unit in units for row in unit.rows])
    return PackedBatch(
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat(positions).to(device)[None],
        layout=make_layout(spans, device),
        predictors=torch.cat(predictors).to(device),
        token_ids=rollout.token_ids[rows][scored],
        cu_seqlens=counts.cumsum(0).to(device=device, dtype=torch.int32),
        rows=rows,
        mask=scored,
    )
