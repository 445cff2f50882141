"""Generalised advantage estimation as a scan from the last token to the first.

All sequences lie in one flat run of tokens, cut into chunks of `BLOCK`, so a long row spreads over
many programs and short ones share one. What a token hands to the valid token before it,
h_t = gamma V_t + gamma lam A_t with A_t = r_t - V_t + h_{t+1}, is affine in what it received, and
affine maps compose. A thread holds four neighbouring tokens (16 bytes), composes them by hand, and
a scan over the threads, loaded in reverse, gives each what comes from behind it. The tree of
compositions is fixed, so two runs agree to the bit.

Where whole sequences fit in a chunk, one launch does it; else the first launch leaves one map per
chunk and the second composes those behind its own chunk before it writes.
"""

import torch
import triton
import triton.language as tl

from fastrl.triton.gae.gae_maps import NEXT_VALUE, NO_U, UNMET, compose, scalars, scanned
from fastrl.triton.runtime.target import Target

BLOCK = 2048  # tokens of a program
BEHIND = tl.constexpr(64)  # chunks behind one's own that are composed at a time

WHOLE = tl.constexpr(0)  # sequences end inside their chunk
MAPS = tl.constexpr(1)  # first of two launches: the map of each chunk
APPLY = tl.constexpr(2)  # second of two: what comes from behind, then advantages

#: Arguments whose value must not lead to another compilation; ALIGNED says what accesses need.
RUN_TIME = ("tokens", "length", "sequences", "search_steps", "span")


@triton.jit
def _quarters(x):
    """The four columns of `[G, 4]`, which one thread holds."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _whole(x0, x1, x2, x3):
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [x0.shape[0], 4])


@triton.jit
def _sequence_of(at, cu_seqlens, sequences, search_steps):
    """The number of the sequence that holds a token: the last that begins at or before it."""
    found = tl.zeros_like(at)
    for i in range(search_steps):
        candidate = found + (1 << (search_steps - 1 - i))
        known = candidate < sequences
        start = tl.load(cu_seqlens + candidate, mask=known, other=0)
        found = tl.where(known & (start <= at), candidate, found)
    return found


@triton.jit
def _token(state, token, gamma, decay, U: tl.constexpr, PER_TOKEN: tl.constexpr):
    """Advantage of a token and the state that it leaves, as maps of an unknown state."""
    a, c, g, w, k = state
    active, reward, value, terminated, truncated, last, after = token
    # beyond the last token of a sequence stands gamma times what follows it
    a = tl.where(last, 0.0 if PER_TOKEN else gamma * after, a)
    c = tl.where(last, 0.0, c)
    if U != NO_U:
        g = tl.where(last, 0.0, g)
        k = tl.where(last, 0.0, k)
        w = tl.where(last, 1.0 if PER_TOKEN else gamma * after, w)
    ha, hc, hg = a, c, g
    if U == UNMET:
        ha = ha + tl.where(w != 0, gamma * after, 0.0)
        hg = tl.where(k != 0, gamma * after, hg)
    if truncated is not None:
        if PER_TOKEN:
            ha = tl.where(truncated, gamma * after, ha)
            hg = tl.where(truncated, 0.0, hg)
        else:
            ha = tl.where(truncated, w, ha)
            hg = tl.where(truncated, k, hg)
        hc = tl.where(truncated, 0.0, hc)
    if terminated is not None:
        ha = tl.where(terminated, 0.0, ha)
        hc = tl.where(terminated, 0.0, hc)
        hg = tl.where(terminated, 0.0, hg)
    advantage = reward - value + ha
    a = tl.where(active, gamma * value + decay * advantage, a)
    c = tl.where(active, decay * hc, c)
    if U != NO_U:
        g = tl.where(active, decay * hg, g)
        w = tl.where(active, 0.0 if PER_TOKEN else gamma * value, w)
        k = tl.where(active, 0.0, k)
    return advantage, (a, c, g, w, k)


@triton.jit
def _from_behind(maps, chunk, chunks, U: tl.constexpr):
    """What the chunks behind hand over: their maps composed until one does not ask further."""
    a, c, g, w, k = 0.0, 1.0, 0.0, 0.0, 1.0
    at = chunk + 1
    while (at < chunks) & ((c != 0.0) | (k != 0.0)):
        place = at + BEHIND - 1 - tl.arange(0, BEHIND)  # the farthest first
        known = place < chunks
        row = maps + place
        b = tl.load(row, mask=known, other=0.0)
        d = tl.load(row + chunks, mask=known, other=1.0)
        zero = tl.zeros_like(b)
        if U == NO_U:
            block = (b, d, zero, zero, zero)
        else:
            block = (
                b,
                d,
                tl.load(row + 2 * chunks, mask=known, other=0.0),
                tl.load(row + 3 * chunks, mask=known, other=0.0),
                tl.load(row + 4 * chunks, mask=known, other=1.0),
            )
        whole, _ = scanned(block, U)
        b, d, e, f, h = scalars(whole)
        a, c, g, w, k = compose(b, d, e, f, h, a, c, g, w, k)
        if U == NO_U:
            k = 0.0
        at += BEHIND
    return a, w


@triton.jit(do_not_specialize=RUN_TIME)
def gae_kernel(
    rewards,
    values,
    mask,
    terminated,
    truncated,
    bootstrap,
    cu_seqlens,
    advantages,
    returns,
    maps,
    tokens,
    length,
    sequences,
    search_steps,
    span,
    gamma,
    lam,
    U: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PHASE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * span
    limit = tl.minimum(first + span, tokens)
    if ALIGNED:
        first = tl.multiple_of(first, 4)
        limit = tl.multiple_of(limit, 4)
    groups: tl.constexpr = BLOCK // 4
    group = groups - 1 - tl.arange(0, groups)
    place = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = first + place
    inside = at < limit
    decay = gamma * lam

    if cu_seqlens is not None:
        sequence = _sequence_of(at, cu_seqlens, sequences, search_steps)
        last = inside & (at == tl.load(cu_seqlens + sequence + 1, mask=inside, other=0) - 1)
    else:
        position = (first % length).to(tl.int32) + place
        last = inside & (position % length == length - 1)
        sequence = first // length + position // length
    reward = tl.load(rewards + at, mask=inside, other=0.0)
    value = tl.load(values + at, mask=inside, other=0.0)
    active = inside
    if mask is not None:
        active = inside & (tl.load(mask + at, mask=inside, other=0) != 0)
    r, v, valid, ends = _quarters(reward), _quarters(value), _quarters(active), _quarters(last)
    ts = (None, None, None, None)
    if terminated is not None:
        ts = _quarters(tl.load(terminated + at, mask=inside, other=0) != 0)
    us = (None, None, None, None)
    if truncated is not None:
        us = _quarters(tl.load(truncated + at, mask=inside, other=0) != 0)
    if bootstrap is None:
        after = _quarters(tl.zeros_like(reward))
    elif PER_TOKEN:
        after = _quarters(tl.load(bootstrap + at, mask=inside, other=0.0))
    else:
        after = _quarters(tl.load(bootstrap + sequence, mask=last, other=0.0))

    zero = tl.zeros([groups], tl.float32)
    one = tl.full([groups], 1.0, tl.float32)
    state = (zero, one, zero, zero, one)
    for i in tl.static_range(3, -1, -1):
        token = (valid[i], r[i], v[i], ts[i], us[i], ends[i], after[i])
        _, state = _token(state, token, gamma, decay, U, PER_TOKEN)
    whole, behind = scanned(state, U)
    if PHASE == MAPS:
        chunks = tl.num_programs(0)
        a, c, g, w, k = scalars(whole)
        tl.store(maps + chunk, a)
        tl.store(maps + chunks + chunk, c)
        if U != NO_U:
            tl.store(maps + 2 * chunks + chunk, g)
            tl.store(maps + 3 * chunks + chunk, w)
            tl.store(maps + 4 * chunks + chunk, k)
    else:
        h0, u0 = 0.0, 0.0
        if PHASE == APPLY:
            h0, u0 = _from_behind(maps, chunk, tl.num_programs(0), U)
        ja, jc, jg, jw, jk = behind
        a, _, _, w, _ = compose(h0, 0.0, 0.0, u0, 0.0, ja, jc, jg, jw, jk)
        state = (a, zero, zero, w, zero)
        a3, state = _token(
            state,
            (valid[3], r[3], v[3], ts[3], us[3], ends[3], after[3]),
            gamma,
            decay,
            U,
            PER_TOKEN,
        )
        a2, state = _token(
            state,
            (valid[2], r[2], v[2], ts[2], us[2], ends[2], after[2]),
            gamma,
            decay,
            U,
            PER_TOKEN,
        )
        a1, state = _token(
            state,
            (valid[1], r[1], v[1], ts[1], us[1], ends[1], after[1]),
            gamma,
            decay,
            U,
            PER_TOKEN,
        )
        a0, state = _token(
            state,
            (valid[0], r[0], v[0], ts[0], us[0], ends[0], after[0]),
            gamma,
            decay,
            U,
            PER_TOKEN,
        )
        advantage = _whole(a0, a1, a2, a3)
        tl.store(advantages + at, tl.where(active, advantage, 0.0), mask=inside)
        tl.store(returns + at, tl.where(active, advantage + value, 0.0), mask=inside)


def gae_fwd(rewards, values, mask, terminated, truncated, bootstrap_values, cu_seqlens, gamma, lam):
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    tokens, length = rewards.numel(), rewards.shape[1]
    if tokens == 0:
        return advantages, returns
    sequences = rewards.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    per_token = bootstrap_values is not None and bootstrap_values.dim() == 2
    u = UNMET if per_token else NO_U if truncated is None else NEXT_VALUE
    block = _block(u)
    # as many whole sequences as fit, so that every program begins at a multiple of 16 bytes
    span = 0 if cu_seqlens is not None else block // length * length
    if span % 4:
        span = block // length // 4 * 4 * length
    whole = span > 0 or tokens <= block
    span = span or block
    chunks = triton.cdiv(tokens, span)
    maps = None if whole else rewards.new_empty(5 if u != NO_U else 2, chunks)
    for phase in (WHOLE,) if whole else (MAPS, APPLY):
        gae_kernel[(chunks,)](
            rewards,
            values,
            mask,
            terminated,
            truncated,
            bootstrap_values,
            cu_seqlens,
            advantages,
            returns,
            maps,
            tokens,
            length,
            sequences,
            sequences.bit_length(),
            span,
            gamma,
            lam,
            U=u,
            PER_TOKEN=per_token,
            PHASE=phase,
            ALIGNED=tokens % 4 == 0,
            BLOCK=block,
            enable_fp_fusion=True,
        )
    return advantages, returns


def _block(u):
    """Tokens of a program; maps of two numbers take twice the registers."""
    return BLOCK if u == NO_U else BLOCK // 2


def targets():
    always = {
        **dict.fromkeys(("rewards", "values", "advantages", "returns"), "*fp32"),
        **dict.fromkeys(("tokens", "length", "sequences", "search_steps", "span"), "i32"),
        **dict.fromkeys(("gamma", "lam"), "fp32"),
        "mask": "*i1",
    }
    ends = {"terminated": "*i1", "truncated": "*i1"}
    per_token = {**always, **ends, "bootstrap": "*fp32", "maps": "*fp32"}
    packed = {**always, **ends, "bootstrap": "*fp32", "maps": "*fp32", "cu_seqlens": "*i32"}
    # name, types, phase, state, bytes per token, instructions, accesses under 16 bytes: flags of a
    # byte each, the map of the chunk, the search for a token's sequence
    variants = [
        ("gae", always, WHOLE, NO_U, 17, 85, 4),
        ("gae_maps", {**always, "maps": "*fp32"}, MAPS, NO_U, 9, 70, 6),
        ("gae_apply", {**always, "maps": "*fp32"}, APPLY, NO_U, 17, 95, 6),
        ("gae_ends_apply", per_token, APPLY, UNMET, 23, 255, 17),
        ("gae_packed_apply", packed, APPLY, NEXT_VALUE, 23, 260, 65),
    ]
    return [
        Target(
            name=name,
            kernel=gae_kernel,
            types=types,
            constants={
                "U": state.value,
                "PER_TOKEN": state.value == UNMET.value,
                "PHASE": phase.value,
                "ALIGNED": True,
                "BLOCK": _block(state),
            },
            divisible=tuple(n for n, t in types.items() if t[0] == "*"),
            num_warps=4,
            element_bytes=4,
            bytes_per_element=moved,
            instructions=instructions,
            block=_block(state),
            loops=0,
            narrow=narrow,
            options={"enable_fp_fusion": True},
        )
        for name, types, phase, state, moved, instructions, narrow in variants
    ]
