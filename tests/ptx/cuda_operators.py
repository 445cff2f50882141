"""The operators of the CUDA backend on CPU tensors: their launches go to the machine as nvcc's PTX.

nvcc compiles csrc/cuda for sm_90, as for a GPU; csrc/cuda/torch is compiled for the key of the CPU,
and linked with a runtime of our own. So `backend="cuda"` goes the whole way from the public
function to the kernel.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

from tests.ptx.machine import COMPILER, FOLDER, TORCH, compiled, machine, one_process, place_of

ROOT = FOLDER.parents[1]
CSRC = ROOT / "csrc"
NVCC_FLAGS = ["-std=c++17", "-O3", "-lineinfo", "-arch=compute_90", "-code=compute_90", f"-I{CSRC}"]
#: Rows are split from 2 KiB on, so that small ones take clusters; the launch alone looks at it.
SPLIT = "-DFASTRL_SPLIT_BYTES=2048"
#: (major, SMs) of the device by seed; before sm_90 there are no clusters.
DEVICES = ((9, 132), (9, 2), (9, 1), (9, 5))


def nvcc():
    """Return the CUDA compiler: of the package nvidia-cuda-nvcc, or on PATH."""
    packages = importlib.util.find_spec("nvidia")
    for folder in packages.submodule_search_locations if packages else ():
        for found in Path(folder).glob("cu*/bin/nvcc"):
            return str(found)
    return shutil.which("nvcc")


def _compile_kernels(source):
    """Compile a .cu file to an object and PTX, once for the same sources."""
    headers = [*CSRC.glob("*.h"), *(CSRC / "cuda").rglob("*.h"), *(CSRC / "cuda").rglob("*.cuh")]
    command = [
        nvcc(),
        *NVCC_FLAGS,
        SPLIT,
        "-Xcompiler",
        "-fPIC",
        "-cudart",
        "none",
        "-c",
        str(source),
    ]
    target = place_of(f"{source.stem}-kernels", command, [source, *headers])
    ptx = target.with_suffix(".ptx")
    if not (target.exists() and ptx.exists()):
        folder = target.with_suffix(f".{os.getpid()}")
        folder.mkdir()
        whole = [*command, "--keep", "--keep-dir", str(folder), "-o", str(folder / "kernels.o")]
        done = subprocess.run(whole, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(whole)}\n{done.stderr}")
        (found,) = folder.glob("*.ptx")
        found.rename(ptx)
        (folder / "kernels.o").rename(target)
        shutil.rmtree(folder)
    return target, ptx.read_text()


@functools.cache
def load():
    """Build and register the operators; return their library, whose launches the machine runs."""
    found = machine()
    toolkit = Path(nvcc()).resolve().parents[1]
    flags = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", *TORCH, f"-I{CSRC}"]
    flags += [f"-isystem{path}" for path in (toolkit / "include", sysconfig.get_path("include"))]
    stable = [
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        "-include",
        str(FOLDER / "cuda" / "on_cpu.h"),
    ]
    headers = [*CSRC.glob("*.h"), *(CSRC / "cuda").rglob("*.h"), FOLDER / "cuda" / "on_cpu.h"]

    def operators(source):
        command = [COMPILER, *flags, *stable, "-c", str(source)]
        return compiled(f"{source.stem}-operators", command, [source, *headers])

    sources = sorted(
        (CSRC / "cuda").rglob("*.cu"), key=lambda path: -path.name.startswith("logits")
    )
    glue = [path for path in (CSRC / "cuda" / "torch").glob("*.cpp") if path.stem != "bind"]
    with one_process(), ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = pool.map(_compile_kernels, sources)
        objects = [*pool.map(operators, glue)]
        runtime = FOLDER / "cuda" / "runtime.cpp"
        command = [COMPILER, *[flag for flag in flags if "hidden" not in flag], "-c", str(runtime)]
        objects.append(compiled("runtime", command, [runtime]))
        kernels = [*kernels]
    ptx = {}
    for kernel, text in kernels:
        objects.append(kernel)
        ptx |= dict.fromkeys(re.findall(r"\.entry (\w+)\(", text), text)
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + [
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ]
    # the names of this runtime win over those that torch may bring
    command = [COMPILER, "-shared", "-Wl,-Bsymbolic", *map(str, objects), *libraries]
    library = str(compiled("operators", command, []))
    torch.ops.load_library(library)
    loaded = ctypes.CDLL(library)

    @ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_char_p, *[ctypes.c_uint] * 4, ctypes.POINTER(ctypes.c_void_p)
    )
    def launched(name, blocks, threads, cluster, shared, arguments):
        name = name.decode()
        try:
            kernel, _ = found.kernel(ptx[name], name)
            parts = [
                ctypes.string_at(arguments[n], size)
                for n, (_, size, _) in enumerate(kernel.parameters)
            ]
            assert len(parts) == 1
            found.launch(ptx[name], name, (blocks, 1, 1), threads, parts[0], cluster, shared)
        except Exception as error:  # a callback cannot raise
            loaded.ptx_failure(str(error).encode())
            return 1
        return 0

    loaded.ptx_on_launch(launched)
    loaded.launched, loaded.ptx = launched, ptx
    return loaded


@contextlib.contextmanager
def device(major, sms):
    """Launch as on a device of so many SMs; before 9 there are no clusters of blocks."""
    load().ptx_device(major, sms)
    try:
        yield
    finally:
        load().ptx_device(*DEVICES[machine().seed % len(DEVICES)])
