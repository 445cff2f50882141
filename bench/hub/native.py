"""The compiled extensions, of which the package for `kernels` has none."""

from __future__ import annotations

import torch

from . import fakes as fakes
from . import library as library

#: Why the compiled backends cannot be used, as one sentence.
missing = "the package for `kernels` holds Triton kernels alone; install fastrl itself"
cuda_missing = missing


def has_matrix_tiles() -> bool:
    """Return whether the compiled CPU backend can multiply bfloat16 matrices on AMX tiles."""
    return False


def new_large(
    like: torch.Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return an uninitialised tensor."""
    return like.new_empty(shape, dtype=dtype)
