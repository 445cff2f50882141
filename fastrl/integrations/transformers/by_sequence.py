"""Attention within each sequence of a packed row, without a mask over the whole row.

A packed row ``[1, L]`` holds several sequences one after another. The masks that `transformers`
builds for it take L^2 bytes. Here `scaled_dot_product_attention` runs on each sequence, or on
sequences of similar lengths together. A sequence may continue a prefix that it shares with others:
its tokens attend to the prefix and to themselves. `transformers` finds the function under the name
``by_sequence`` (`AttentionInterface`) and passes it the layout as the keyword ``sequences``.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

BY_SEQUENCE = "by_sequence"
#: Sequences of this many tokens or more are attended to one at a time, without being copied.
_LONG = 1024
#: Most tokens, prefixes included, of shorter sequences that are attended to together.
_TOGETHER = 16384
#: Queries per call if a mask is necessary, which bounds the mask.
_QUERIES = 512


class Span(NamedTuple):
    """Where a sequence, or a part after a shared prefix, lies in a packed row."""

    start: int
    end: int
    prefix: tuple[int, int] = (0, 0)  # start and end; empty if there is none


class Block(NamedTuple):
    """S spans that are attended to together; shorter spans are padded at the end to T tokens.

    The mask is causal, so no token attends to the padding behind it.
    """

    spans: int  # S
    queries: int  # T
    keys: int  # P + T: the prefixes of the spans, of one length, come first


class Layout(NamedTuple):
    """The attention pattern of a packed row, the same for all layers."""

    blocks: list[Block]
    queries: Tensor | None  # positions in the row of the blocks' S T queries; None: the row itself
    keys: Tensor | None  # positions of their S (P + T) keys
    order: Tensor | None  # [L], the place of each token's output among the queries


def make_layout(spans: Iterable[Span], device: torch.device) -> Layout:
    """Return the layout of the non-empty spans that cover a row."""
    blocks: list[Block] = []
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    own: list[Tensor] = []  # whether a query is a token of its span
    for group in _groups(sorted(spans, key=_by_lengths)):
        longest, prefix = group[0].end - group[0].start, _prefix(group[0])
        blocks.append(Block(len(group), longest, prefix + longest))
        places = [(span.start, span.end, span.prefix[0]) for span in group]
        start, end, shared = torch.tensor(places).T[..., None]  # each [S, 1]
        at = start + torch.arange(longest)
        padded = at.minimum(end - 1)  # a shorter span repeats its last token
        own.append((at < end).flatten())
        queries.append(padded.flatten())
        keys.append(torch.cat([shared + torch.arange(prefix), padded], 1).flatten())
    of_queries, of_keys, real = torch.cat(queries), torch.cat(keys), torch.cat(own)
    order = torch.empty(int(real.sum()), dtype=torch.long)
    order[of_queries[real]] = real.nonzero()[:, 0]

    def index(places: Tensor, of: int) -> Tensor | None:
        return None if torch.equal(places, torch.arange(of)) else places.to(device)

    row = len(order)
    return Layout(blocks, index(of_queries, row), index(of_keys, row), index(order, len(real)))


def attend_by_sequence(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequences: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention ``[1, L, heads, D]`` of a packed row, as `transformers` calls it.

    Raises:
        ValueError: The layer needs something that this function does not compute.
    """
    if sequences is None:
        raise ValueError(
            f"attention must be sdpa or eager for this model: its layers do not pass the layout of "
            f"packed rows on, which {BY_SEQUENCE} needs"
        )
    known = ("softcap", "s_aux", "position_bias")
    unsupported = [name for name in known if options.get(name) is not None]
    if unsupported or dropout or attention_mask is not None:
        wrong = ", ".join(unsupported) or ("dropout" if dropout else "attention_mask")
        raise ValueError(
            f"attention must be eager, flex_attention or flash_attention_2 for this model: "
            f"{BY_SEQUENCE} does not support {wrong}"
        )
    query = _take(query, sequences.queries)
    key, value = _take(key, sequences.keys), _take(value, sequences.keys)
    queries = [block.spans * block.queries for block in sequences.blocks]
    keys = [block.spans * block.keys for block in sequences.blocks]
    outputs = [
        _attend(
            _by_span(q, block.spans),
            _by_span(k, block.spans),
            _by_span(v, block.spans),
            scaling,
            sliding_window,
        )
        for block, q, k, v in zip(
            sequences.blocks,
            query.split(queries, 2),
            key.split(keys, 2),
            value.split(keys, 2),
            strict=True,
        )
    ]
    parts = [output.transpose(1, 2).flatten(0, 1) for output in outputs]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)  # a single part is not copied
    return (flat if sequences.order is None else flat[sequences.order])[None], None


AttentionInterface.register(BY_SEQUENCE, attend_by_sequence)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Return causal attention ``[S, heads, T, D]`` of the last T of K positions."""
    length, total = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if length == total and (window is None or length <= window):
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    if grouped and query.is_cuda:  # with mask and grouped heads, CUDA would store the scores
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        grouped = False
    prefix, parts = total - length, []
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        first = 0 if window is None else max(0, prefix + start - window + 1)
        at = torch.arange(prefix + start, prefix + end, device=query.device)[:, None]
        other = torch.arange(first, prefix + end, device=query.device)
        allowed = other <= at
        if window is not None:
            allowed &= other > at - window
        keys = slice(first, prefix + end)
        part = scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, keys],
            value[:, :, keys],
            attn_mask=allowed,
            scale=scaling,
            enable_gqa=grouped,
        )
        parts.append(part)
    return torch.cat(parts, 2)


def _take(heads: Tensor, places: Tensor | None) -> Tensor:
    """Return the tokens at some places of ``[1, heads, L, D]``."""
    return heads if places is None else heads.index_select(2, places)


def _by_span(heads: Tensor, spans: int) -> Tensor:
    """Return ``[1, heads, S T, D]`` as ``[S, heads, T, D]``."""
    _, count, tokens, width = heads.shape
    return heads.view(count, spans, tokens // spans, width).transpose(0, 1)


def _groups(spans: list[Span]) -> Iterator[list[Span]]:
    """Yield neighbors of similar lengths with prefixes of equal length, or one long span."""
    group: list[Span] = []
    for span in spans:
        if group and not _fits(group, span):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _fits(group: list[Span], span: Span) -> bool:
    first = group[0]  # the longest
    longest, length = first.end - first.start, span.end - span.start
    total = (len(group) + 1) * (longest + _prefix(first))
    similar = longest - length <= max(16, longest // 8)
    equal = _prefix(first) == _prefix(span)
    return equal and longest < _LONG and similar and total <= _TOGETHER


def _prefix(span: Span) -> int:
    """Return the number of tokens in the prefix."""
    return span.prefix[1] - span.prefix[0]


def _by_lengths(span: Span) -> tuple[int, int, int]:
    return _prefix(span), span.start - span.end, span.start
