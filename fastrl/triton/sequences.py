"""The sequence of a batch to which a token belongs."""

import triton
import triton.language as tl


@triton.jit
def packed_sequence(token, cu_seqlens, sequences):
    """Return the index of the last sequence that begins at or before a token (or many tokens)."""
    step = sequences * 0 + 1
    while step < sequences:
        step *= 2
    found = tl.zeros_like(token).to(tl.int32)
    while step > 0:
        candidate = found + step
        known = candidate < sequences
        begin = tl.load(cu_seqlens + candidate, mask=known, other=0)
        found = tl.where(known & (begin <= token), candidate, found)
        step //= 2
    return found


@triton.jit
def padded_sequence(start, block, length):
    """Return the row indices of the tokens `start + block` in a batch of this length.

    It divides in float32, at a fraction of the cost of an integer division. The result is exact:
    with 1/2 added, no quotient comes near an integer, up to the longest row that is distinguished
    from longer ones.
    """
    held = tl.minimum(length, 1 << 18)  # far longer than a block
    left = length - start % length
    position = tl.maximum(held - left, 0).to(tl.float32) + 0.5
    rows = ((block.to(tl.float32) + position) * (1.0 / held.to(tl.float32))).to(tl.int32)
    return (start // length).to(tl.int32) + rows
