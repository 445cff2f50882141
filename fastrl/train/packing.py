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
    repeated: bool = False  # a rank computes it only to keep step with the others: counts for 0
    last: bool = True  # no other follows in its iterator, on any rank

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
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[PackedBatch]:
    """Pack completions into as few rows of at most ``tokens`` tokens as first fit finds.

    With several ranks each packs its own share, and all yield the same number of micro-batches:
    those who have fewer repeat one.

    Args:
        rollout: The completions.
        rows: Indices of those to pack.
        mask: Bool ``[N, T]``, which tokens are scored: the first tokens of a completion. A
            completion without any is left out.
        tokens: Tokens per row. A longer sequence has a row of its own.
        share_prompts: Whether completions of one prompt in one row share its tokens.
        rank: Whose share to pack.
        ranks: How many shares there are, of about the same number of tokens.
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
    shares = [_first_fit(share, tokens) for share in _balanced(units, ranks)]
    own, most = shares[rank], max(map(len, shares))
    smallest = min((packed for share in shares for packed in share), key=_tokens, default=[])
    for i in range(most):
        packed = own[i] if i < len(own) else smallest
        batch = _pack(rollout, packed, mask, lengths)
        yield batch._replace(repeated=i >= len(own), last=i == most - 1)


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


def _balanced(units: list[_Unit], shares: int) -> list[list[_Unit]]:
    """The units in shares, the largest first, each in the share with the fewest tokens so far."""
    if shares == 1:
        return [units]
    parts: list[list[_Unit]] = [[] for _ in range(shares)]
    for unit in sorted(units, key=lambda unit: -unit.tokens):
        min(parts, key=_tokens).append(unit)
    return parts


def _tokens(units: list[_Unit]) -> int:
    return sum(unit.tokens for unit in units)


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


class _Row:
    """A packed row under construction."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.spans: list[Span] = []
        self.length = 0

    def append(self, ids: Tensor, position: int, prefix: tuple[int, int] = (0, 0)) -> int:
        """Add tokens that attend to a prefix and to themselves; return where they start."""
        start, self.length = self.length, self.length + len(ids)
        self.ids.append(ids)
        self.positions.append(torch.arange(position, position + len(ids)))
        if len(ids):
            self.spans.append(Span(start, self.length, prefix))
        return start


def _pack(rollout: Rollout, units: list[_Unit], mask: Tensor, lengths: list[int]) -> PackedBatch:
    device = mask.device
    row = _Row()
    predictors: list[Tensor] = []
    for unit in units:
        prompt = torch.tensor(rollout.prompts[unit.prompt], device=device)
        own = [rollout.token_ids[sample, : lengths[sample] - 1] for sample in unit.rows]
        if len(own) == 1:
            start = row.append(torch.cat([prompt, own[0]]), 0)
            predictors.append(torch.arange(start + len(prompt) - 1, row.length))
            continue
        start = row.append(prompt, 0)
        end = row.length
        for ids in own:
            after = row.append(ids, len(prompt), (start, end))
            predictors += [torch.tensor([end - 1]), torch.arange(after, row.length)]
    samples = torch.tensor([sample for unit in units for sample in unit.rows], device=device)
    scored = mask[samples]
    counts = torch.tensor([0] + [lengths[sample] for unit in units for sample in unit.rows])
    return PackedBatch(
        input_ids=torch.cat(row.ids)[None],
        position_ids=torch.cat(row.positions).to(device)[None],
        layout=make_layout(row.spans, device),
        predictors=torch.cat(predictors).to(device),
        token_ids=rollout.token_ids[samples][scored],
        cu_seqlens=counts.cumsum(0).to(device=device, dtype=torch.int32),
        rows=samples,
        mask=scored,
    )
