"""Generalized advantage estimation as a scan from the last token to the first.

All sequences lie in one flat run of tokens, cut into chunks of `BLOCK`, so a long row is spread
over many programs and short rows share one. A token passes a state to the valid token before it,
h_t = gamma V_t + gamma lam A_t with A_t = r_t - V_t + h_{t+1}. It is affine in the state that the
token received, and affine maps compose. A thread holds four neighboring tokens (16 bytes) and
composes them one after another; a scan over the threads, loaded in reverse, gives each thread the
state from behind it. The tree of compositions is fixed, so two runs agree to the bit.

If whole sequences fit in a chunk, one launch suffices. Otherwise the first launch leaves one map
per chunk, and the second composes the maps behind its own chunk before it writes.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastrl.triton.gae.gae_maps import (
    NEXT_VALUE,
    ONE_NUMBER,
    UNMET,
    GaeMap,
    compose,
    identity_map,
    last_map,
    load_maps,
    rows_of_maps,
    scanned,
    store_map,
)
from fastrl.triton.sequences import packed_sequence

BLOCK = 2048  # tokens of a program
BEHIND = tl.constexpr(64)  # later chunks whose maps a program composes at a time

# which launch
ONLY = tl.constexpr(0)  # sequences end inside their chunk
MAPS = tl.constexpr(1)  # first of two: the map of each chunk
APPLY = tl.constexpr(2)  # second of two: the state from behind, then advantages


class Inputs(NamedTuple):
    """The tensors of the operator."""

    rewards: Any
    value_estimates: Any  # `values` is a member of Triton's tuples
    mask: Any
    terminated: Any
    truncated: Any
    bootstrap_values: Any
    cu_seqlens: Any


class Outputs(NamedTuple):
    """The results of the operator."""

    advantages: Any
    returns: Any


class Specialization(NamedTuple):
    """The constants that a kernel is compiled for.

    Attributes:
        state: whether the state is one number, or the meaning of the second.
        phase: the launch: the only one, or one of two.
        aligned: whether chunks begin at multiples of 16 bytes.
        block: tokens of a program.
    """

    state: int
    phase: int
    aligned: bool
    block: int


class Token(NamedTuple):
    """One token of every thread, or all four.

    `after` is the value after the last token of a sequence, or the bootstrap value of each token.
    """

    active: Any
    reward: Any
    value: Any
    terminated: Any
    truncated: Any
    is_last: Any
    after: Any


@triton.jit
def _quarters(x):
    """Return the four columns of `[G, 4]`; one thread holds a row."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _joined(quarters):
    """Return `[G, 4]` from its four columns."""
    x0, x1, x2, x3 = quarters
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [x0.shape[0], 4])


@triton.jit
def _precede(received, quads, i: tl.constexpr, gamma, decay, STATE: tl.constexpr):
    """Return the advantage of token i of each thread's four, and the state that it passes on."""
    token = Token(
        quads.active[i], quads.reward[i], quads.value[i], quads.terminated[i],
        quads.truncated[i], quads.is_last[i], quads.after[i],
    )  # fmt: skip
    PER_TOKEN: tl.constexpr = STATE == UNMET
    constant, trace, by_next, value, is_open = received
    # the state behind the last token of a sequence is gamma times the value that follows
    constant = tl.where(token.is_last, 0.0 if PER_TOKEN else gamma * token.after, constant)
    trace = tl.where(token.is_last, 0.0, trace)
    if STATE != ONE_NUMBER:
        by_next = tl.where(token.is_last, 0.0, by_next)
        is_open = tl.where(token.is_last, 0.0, is_open)
        value = tl.where(token.is_last, 1.0 if PER_TOKEN else gamma * token.after, value)
    h_constant, h_trace, h_next = constant, trace, by_next
    if PER_TOKEN:
        h_constant = h_constant + tl.where(value != 0, gamma * token.after, 0.0)
        h_next = tl.where(is_open != 0, gamma * token.after, h_next)
    if token.truncated is not None:
        if PER_TOKEN:
            h_constant = tl.where(token.truncated, gamma * token.after, h_constant)
            h_next = tl.where(token.truncated, 0.0, h_next)
        else:
            h_constant = tl.where(token.truncated, value, h_constant)
            h_next = tl.where(token.truncated, is_open, h_next)
        h_trace = tl.where(token.truncated, 0.0, h_trace)
    if token.terminated is not None:
        h_constant = tl.where(token.terminated, 0.0, h_constant)
        h_trace = tl.where(token.terminated, 0.0, h_trace)
        h_next = tl.where(token.terminated, 0.0, h_next)
    advantage = token.reward - token.value + h_constant
    constant = tl.where(token.active, gamma * token.value + decay * advantage, constant)
    trace = tl.where(token.active, decay * h_trace, trace)
    if STATE != ONE_NUMBER:
        by_next = tl.where(token.active, decay * h_next, by_next)
        value = tl.where(token.active, 0.0 if PER_TOKEN else gamma * token.value, value)
        is_open = tl.where(token.active, 0.0, is_open)
    return advantage, GaeMap(constant, trace, by_next, value, is_open)


@triton.jit
def _from_behind(maps, chunk, chunks, STATE: tl.constexpr):
    """Compose the maps of the chunks behind, until one is independent of the rest."""
    behind = identity_map(tl.zeros([1], tl.float32).sum(0))
    at = chunk + 1
    needed = behind.trace != 0
    while (at < chunks) & needed:
        farthest_first = at + BEHIND - 1 - tl.arange(0, BEHIND)
        composed, _ = scanned(load_maps(maps, farthest_first, chunks, STATE), STATE)
        behind = compose(last_map(composed), behind)
        needed = behind.trace != 0
        if STATE != ONE_NUMBER:
            needed = needed | (behind.open != 0)
        at += BEHIND
    return behind


@triton.jit(do_not_specialize=("tokens", "length", "sequences", "span"))
def gae_kernel(inputs, out, maps, tokens, length, sequences, span, gamma, lam, SPEC: tl.constexpr):
    STATE: tl.constexpr = SPEC.state
    PHASE: tl.constexpr = SPEC.phase
    GROUPS: tl.constexpr = SPEC.block // 4
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * span
    limit = tl.minimum(first + span, tokens)
    if SPEC.aligned:
        first = tl.multiple_of(first, 4)
        limit = tl.multiple_of(limit, 4)
    group = GROUPS - 1 - tl.arange(0, GROUPS)
    place = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = first + place
    inside = at < limit
    decay = gamma * lam

    if inputs.cu_seqlens is not None:
        sequence = packed_sequence(at, inputs.cu_seqlens, sequences)
        end = tl.load(inputs.cu_seqlens + sequence + 1, mask=inside, other=0)
        is_last = inside & (at == end - 1)
    else:
        position = (first % length).to(tl.int32) + place
        is_last = inside & (position % length == length - 1)
        sequence = first // length + position // length
    reward = tl.load(inputs.rewards + at, mask=inside, other=0.0)
    value = tl.load(inputs.value_estimates + at, mask=inside, other=0.0)
    active = inside
    if inputs.mask is not None:
        active = inside & (tl.load(inputs.mask + at, mask=inside, other=0) != 0)
    if inputs.bootstrap_values is None:
        after = tl.zeros_like(reward)
    elif STATE == UNMET:
        after = tl.load(inputs.bootstrap_values + at, mask=inside, other=0.0)
    else:
        after = tl.load(inputs.bootstrap_values + sequence, mask=is_last, other=0.0)
    terminated, truncated = (None, None, None, None), (None, None, None, None)
    if inputs.terminated is not None:
        terminated = _quarters(tl.load(inputs.terminated + at, mask=inside, other=0) != 0)
    if inputs.truncated is not None:
        truncated = _quarters(tl.load(inputs.truncated + at, mask=inside, other=0) != 0)
    quads = Token(
        _quarters(active), _quarters(reward), _quarters(value),
        terminated, truncated,
        _quarters(is_last), _quarters(after),
    )  # fmt: skip

    state = identity_map(tl.zeros([GROUPS], tl.float32))
    for i in tl.static_range(3, -1, -1):
        _, state = _precede(state, quads, i, gamma, decay, STATE)
    upto, before = scanned(state, STATE)
    if PHASE == MAPS:
        store_map(maps, chunk, tl.num_programs(0), last_map(upto), STATE)
    else:
        behind = identity_map(tl.zeros([1], tl.float32).sum(0))
        if PHASE == APPLY:
            behind = _from_behind(maps, chunk, tl.num_programs(0), STATE)
        # applied to a known state, here zero, a map gives its constant and its value
        received = compose(behind, before)
        zero = tl.zeros([GROUPS], tl.float32)
        state = GaeMap(received.constant, zero, zero, received.value, zero)
        found = ()
        for i in tl.static_range(3, -1, -1):
            advantage, state = _precede(state, quads, i, gamma, decay, STATE)
            found = (advantage,) + found  # type: ignore[assignment]  # noqa: RUF005
        advantage = _joined(found)
        tl.store(out.advantages + at, tl.where(active, advantage, 0.0), mask=inside)
        tl.store(out.returns + at, tl.where(active, advantage + value, 0.0), mask=inside)


def gae_fwd(rewards, values, mask, terminated, truncated, bootstrap_values, cu_seqlens, gamma, lam):
    inputs = Inputs(rewards, values, mask, terminated, truncated, bootstrap_values, cu_seqlens)
    out = Outputs(torch.empty_like(rewards), torch.empty_like(rewards))
    tokens, length = rewards.numel(), rewards.shape[1]
    if tokens == 0:
        return tuple(out)
    sequences = rewards.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    per_token = bootstrap_values is not None and bootstrap_values.dim() == 2
    state = (UNMET if per_token else ONE_NUMBER if truncated is None else NEXT_VALUE).value
    block = block_of(state)
    # as many whole sequences as fit, so that every program begins at a multiple of 16 bytes
    span = 0 if cu_seqlens is not None else block // length * length
    if span % 4:
        span = block // length // 4 * 4 * length
    in_one_launch = span > 0 or tokens <= block
    span = span or block
    chunks = triton.cdiv(tokens, span)
    maps = None if in_one_launch else rewards.new_empty(rows_of_maps(state), chunks)
    for phase in (ONLY,) if in_one_launch else (MAPS, APPLY):
        gae_kernel[(chunks,)](
            inputs,
            out,
            maps,
            tokens,
            length,
            sequences,
            span,
            gamma,
            lam,
            SPEC=Specialization(state, phase.value, tokens % 4 == 0, block),
            enable_fp_fusion=True,
        )
    return tuple(out)


def block_of(state):
    """Return the tokens of a program; a state of two numbers takes twice the registers."""
    return BLOCK if state == ONE_NUMBER.value else BLOCK // 2
