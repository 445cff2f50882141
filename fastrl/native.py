"""The compiled extension `fastrl._C`: importing it registers the C++ implementations."""

from __future__ import annotations

import importlib

import torch

from fastrl import library as library

#: One sentence on why the compiled backend cannot be used, or None when it can.
missing: str | None = None


def cpu_capability() -> str:
    """Return which vector code the compiled CPU backend uses here: avx512, avx2 or plain."""
    return str(torch.ops.fastrl.cpu_capability())


def has_matrix_tiles() -> bool:
    """Say whether the compiled CPU backend has the matrix tiles of AMX to multiply bfloat16."""
    return missing is None and bool(torch.ops.fastrl.has_matrix_tiles())


def new_large(
    like: torch.Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a new tensor whose size is a reason to take care; its contents are arbitrary."""
    tensor = like.new_empty(shape, dtype=dtype)
    if missing is None and tensor.device.type == "cpu":
        torch.ops.fastrl.large_pages_(tensor)
    return tensor


try:
    importlib.import_module("fastrl._C")
except ModuleNotFoundError as error:
    if error.name != "fastrl._C":
        raise
    missing = (
        "the compiled extension is not built: install a C++ compiler (g++ or clang++) and "
        "reinstall from source with `pip install . --no-build-isolation`"
    )
except ImportError as error:
    missing = f"the compiled extension was built but does not load here ({error}); reinstall it"
