"""The contiguous parts of a strided tensor."""

from __future__ import annotations

from torch import Tensor


def segments_of(gradient: Tensor) -> tuple[int, int, int] | None:
    """Return number, length and stride of the contiguous segments that cover a tensor exactly once.

    Return None if the segments have no common stride.
    """
    dims = sorted(
        (stride, size)
        for stride, size in zip(gradient.stride(), gradient.shape, strict=True)
        if size != 1
    )
    length, segments, between = 1, 1, 0
    for stride, size in dims:
        if segments == 1 and stride == length:
            length *= size
        elif segments == 1 and stride > length:
            segments, between = size, stride
        elif segments > 1 and stride == segments * between:
            segments *= size
        else:
            return None
    return segments, length, between
