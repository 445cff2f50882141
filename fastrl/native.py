"""Import of the compiled extensions `fastrl._C` and `fastrl._C_cuda`, which registers operators."""

from __future__ import annotations

import ctypes
import importlib
import sys

import torch

from fastrl import fakes as fakes
from fastrl import library as library

#: Why the compiled CPU backend cannot be used, as one sentence, or None if it can.
missing: str | None = None
#: The same for the CUDA extension, whether or not there is a GPU.
cuda_missing: str | None = None


def cpu_capability() -> str:
    """Return the instruction set of the compiled CPU backend: avx512, avx2 or plain."""
    return str(torch.ops.fastrl.cpu_capability())


def has_matrix_tiles() -> bool:
    """Return whether the compiled CPU backend can multiply bfloat16 matrices on AMX tiles."""
    return missing is None and bool(torch.ops.fastrl.has_matrix_tiles())


def new_large(
    like: torch.Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return an uninitialized tensor; on a CPU, request huge pages for it."""
    tensor = like.new_empty(shape, dtype=dtype)
    if missing is None and tensor.device.type == "cpu":
        torch.ops.fastrl.huge_pages_(tensor)
    return tensor


def _driver_too_old() -> str | None:
    """Return why the driver cannot run the CUDA extension, as one sentence, or None if it can.

    A driver runs programs of its own major version of CUDA and of earlier ones.
    """
    runtime = getattr(sys.modules["fastrl._C_cuda"], "CUDART_VERSION", 0)  # 1000 major + 10 minor
    supported = ctypes.c_int()
    try:  # initialises nothing, so that processes can still fork
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(supported))
    except OSError:
        return None  # WSL and others have it elsewhere; a launch will tell
    if supported.value // 1000 >= runtime // 1000:
        return None
    return (
        f"the extension was compiled with CUDA {runtime // 1000}, and the NVIDIA driver supports "
        f"CUDA {supported.value // 1000}.{supported.value % 1000 // 10}: update the driver"
    )


def _load(module: str, compiler: str, install: str) -> str | None:
    """Import a compiled module; return why it cannot be imported, or None."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return (
            f"the compiled extension is not built: install {compiler} and reinstall from source "
            f"with `{install} --force-reinstall --no-deps --no-build-isolation --no-binary "
            "fastrl-kernels fastrl-kernels`, or in a checkout with `.` in place of the last name"
        )
    except ImportError as error:
        return f"the compiled extension was built but does not load here ({error}); reinstall it"
    return None


def _out_of_date() -> str | None:
    """Return which operator the loaded extension lacks, as one sentence, or None."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in library.OPERATORS:
        keys = ("CPU", "CompositeExplicitAutograd")
        if name.startswith(library.IN_PYTHON) or name in library.ONLY_ON_GPUS:
            continue
        if not any(has_kernel(f"fastrl::{name}", key) for key in keys):
            return f"the compiled extension is older than fastrl (it lacks {name}); build it again"
    return None


missing = (
    _load("fastrl._C", "a C++ compiler (g++ or clang++)", "FASTRL_BUILD=cpu pip install")
    or _out_of_date()
)
if torch.version.cuda is None:
    cuda_missing = "this torch was built without CUDA"
else:
    cuda_missing = (
        _load("fastrl._C_cuda", "the CUDA toolkit (nvcc)", "FASTRL_BUILD=cuda pip install")
        or _driver_too_old()
    )
