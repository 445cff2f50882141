"""Import of the compiled extensions `fastrl._C` and `fastrl._C_cuda`, which registers operators."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch
from torch.torch_version import TorchVersion

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


def _load(module: str, compiler: str, build: str) -> str | None:
    """Import a compiled module; return why it cannot be imported, or None."""
    if TorchVersion(torch.__version__) < "2.10":
        return f"fastrl needs torch 2.10 or later, and this is torch {torch.__version__}"
    here = Path(__file__).resolve().parent
    spec = importlib.util.find_spec(module)
    # an editable installation of another checkout may find its own module for this package
    if spec is None or Path(str(spec.origin)).parent.resolve() != here:
        in_place = "`{}pip install --no-build-isolation -e .` in " + str(here.parent)
        is_checkout = (here.parent / "csrc").exists()
        if is_checkout and (hidden := _hidden(module, here)):
            return (
                f"{here} has no compiled extension and hides the installed fastrl in {hidden}, "
                f"which has one: run Python in another folder, or {in_place.format('')}"
            )
        again = (
            in_place
            if is_checkout
            else "`{}pip install --force-reinstall --no-deps --no-build-isolation --no-binary "
            "fastrl-kernels fastrl-kernels`"
        ).format(f"{build} ")
        return f"the compiled extension is not built: install {compiler}, then {again}"
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"the compiled extension was built but does not load here ({error}); reinstall it"
    return None


def _hidden(module: str, here: Path) -> Path | None:
    """Return the folder of an installed fastrl other than ``here`` that has a compiled module."""
    for installed in importlib.metadata.distributions(name="fastrl-kernels"):
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        root = Path(str(installed.locate_file("")))
        if origin.get("dir_info", {}).get("editable"):
            root = Path(url2pathname(urlsplit(origin["url"]).path))
        folder = (root / "fastrl").resolve()
        if folder != here and any(folder.glob(f"{module.partition('.')[2]}.*")):
            return folder
    return None


def _out_of_date() -> str | None:
    """Return which operator the loaded extension lacks, as one sentence, or None."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in library.OPERATORS:
        keys = ("CPU", "CompositeExplicitAutograd")
        if name in library.ONLY_ON_GPUS:
            continue
        if not any(has_kernel(f"fastrl::{name}", key) for key in keys):
            return f"the compiled extension is older than fastrl (it lacks {name}); build it again"
    return None


missing = (
    _load("fastrl._C", "a C++ compiler (g++ or clang++)", "FASTRL_BUILD=cpu") or _out_of_date()
)
if torch.version.cuda is None:
    cuda_missing = "this torch was built without CUDA"
else:
    cuda_missing = (
        _load("fastrl._C_cuda", "the CUDA toolkit (nvcc)", "FASTRL_BUILD=cuda") or _driver_too_old()
    )
