"""Minibatches, and micro-batches of sequences that are packed into rows without padding."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastrl import KeptTokens, TopKLogprobs
from fastrl.integrations.transformers.by_sequence import Layout, make_layout
from fastrl.integrations.transformers.packing import Row, Unit, ranges, rows_of
from fastrl.train.config import RunConfig
from fastrl.train.rollout import Rollout


class PackedBatch(NamedTuple):
    """S completions and their prompts in one row of L tokens, of which n are scored.

    The last token of a completion predicts no other token, so it is not in the row.
    """

    input_ids: Tensor  # [1, L]
    position_ids: Tensor  # [1, L], which restart with each sequence
    layout: Layout
    predictors: Tensor  # [n], the position in the row of the token before each scored token
    token_ids: Tensor  # [n], the scored tokens
    cu_seqlens: Tensor  # [S + 1], int32: where the scored tokens of each completion begin
    rows: Tensor  # [S], the completions in the rollout
    mask: Tensor  # bool [S, T], which of their tokens are scored
    kept: KeptTokens | None  # the sets of the scored tokens

    def take(self, values: Tensor) -> Tensor:
        """Return the values ``[n]`` of the scored tokens from values ``[N, T]`` of the rollout."""
        return values[self.rows][self.mask]

    def top_logprobs(self, rollout: Rollout) -> TopKLogprobs | None:
        """Return the most likely tokens ``[n, K]`` of the sampler, if the rollout has them."""
        top = rollout.top_logprobs
        return None if top is None else TopKLogprobs(*map(self.take, top))

    def put(self, values: Tensor, into: Tensor) -> None:
        """Write values ``[n]`` of the scored tokens into values ``[N, T]`` of the rollout."""
        part = into[self.rows]
        part[self.mask] = values
        into[self.rows] = part


def minibatches(samples: int, config: RunConfig, group_size: int = 1) -> Iterator[Tensor]:
    """Yield row indices for each optimizer step: every group once per epoch, shuffled."""
    rows = torch.arange(samples).view(-1, group_size)
    for _ in range(config.epochs):
        for groups in torch.randperm(len(rows)).tensor_split(config.minibatches):
            yield rows[groups].flatten()


def normalizer(mask: Tensor, aggregation: str) -> Tensor:
    """Return the loss's denominator in an optimizer step: its tokens or non-empty sequences.

    With it, the gradients of the micro-batches add up to the gradient of the whole minibatch.
    """
    counted = mask if aggregation == "token-mean" else mask.any(1)
    return counted.sum().clamp(min=1)


def micro_batches(
    rollout: Rollout, rows: Tensor, mask: Tensor, *, tokens: int, share_prompts: bool = False
) -> Iterator[PackedBatch]:
    """Pack completions into rows of at most ``tokens`` tokens, as few as first fit finds.

    Args:
        rollout: The completions.
        rows: Indices of the completions to pack.
        mask: Bool ``[N, T]``, the tokens to score. Tokens after the last scored token of a
            completion are left out, and so is a completion without scored tokens.
        tokens: Tokens per row. A longer sequence has a row of its own.
        share_prompts: Whether completions of one prompt in one row share its tokens.
    """
    ends = torch.where(mask, torch.arange(1, mask.shape[1] + 1, device=mask.device), 0)
    lengths = ends.amax(1).tolist()
    prompt_of = rollout.prompt_of.tolist()
    together: dict[int, list[int]] = {}
    for row in rows.tolist():
        if lengths[row]:
            together.setdefault(prompt_of[row] if share_prompts else row, []).append(row)
    units = [
        Unit(
            tuple(some),
            len(rollout.prompts[prompt_of[some[0]]]),
            tuple(lengths[i] - 1 for i in some),
        )
        for some in together.values()
    ]
    for packed in rows_of(units, tokens):
        yield _pack(rollout, packed, mask, lengths, prompt_of)


def _pack(
    rollout: Rollout, row: Row, mask: Tensor, lengths: list[int], prompt_of: list[int]
) -> PackedBatch:
    device, longest, length = mask.device, mask.shape[1], row.tokens
    chosen = [part.sequence for part in row.parts]
    tokens: list[int] = []  # of the prompts, which follow the completions in `source`
    # of the row: the first position, the place in `source`, the number of tokens
    pieces: list[tuple[int, int, int]] = []
    # of tokens that predict each completion's: the first, how many
    places: list[tuple[int, int]] = []
    for i, part in enumerate(row.parts):
        if part.leads:
            prompt = rollout.prompts[prompt_of[part.sequence]]
            pieces.append((0, len(chosen) * longest + len(tokens), len(prompt)))
            tokens += prompt
        begin, size = part.own[0], part.own[1] - part.own[0]
        pieces.append((len(prompt), i * longest, size))
        places += [(part.prefix[1] - 1, 1), (begin, size)]
    first, at, sizes = torch.tensor(pieces).unbind(1)
    joined = [ranges(first, sizes), ranges(at, sizes), ranges(*torch.tensor(places).unbind(1))]
    positions, at, predictors = torch.cat(joined).to(device).split([length, length, len(joined[2])])

    samples = torch.tensor(chosen, device=device)
    completions, scored = rollout.token_ids[samples], mask[samples]
    source = torch.cat([completions.flatten(), torch.tensor(tokens, device=device)])
    ends = torch.tensor([lengths[sample] for sample in chosen], device=device)
    before_end = torch.arange(longest, device=device) < ends[:, None]
    kept = rollout.kept
    if kept is not None:
        place = torch.arange(rollout.mask.numel(), device=device).view(rollout.mask.shape)
        kept = kept.take(place[samples][scored])
    return PackedBatch(
        input_ids=source[at][None],
        position_ids=positions[None],
        layout=make_layout(row.spans, device),
        predictors=predictors[scored[before_end]],
        token_ids=completions[scored],
        cu_seqlens=pad(scored.sum(1).cumsum(0), (1, 0)).to(torch.int32),
        rows=samples,
        mask=scored,
        kept=kept,
    )
