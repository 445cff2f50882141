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
