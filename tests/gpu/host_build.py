"""Compiles the programs of tests/gpu/host: the CUDA kernels on a machine of CPU threads.

What this cannot show, but a GPU does: that the device version of the primitives does what the host
version does, above all its instructions for clusters, bulk copies and the order of memory between
them and the threads (`fence_bulk` does nothing here), and how many clusters a device holds.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "host"
BUILT = ROOT / "build" / "cuda-host"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = [
    "-std=c++20",
    "-g1",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
    f"-I{ROOT / 'csrc'}",
    f"-I{SOURCES}",
    '-DFASTRL_HOST_PRIMITIVES="primitives.h"',
]
SANITIZERS = {
    "address": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread", "-fno-sanitize-recover=all"],
}
OF_TORCH = [
    "-fvisibility=hidden",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    *(f"-isystem{path}" for path in cpp_extension.include_paths()),
    f"-isystem{sysconfig.get_path('include')}",
]
LIBRARIES = [f"-L{path}" for path in cpp_extension.library_paths()]
LIBRARIES += ["-ltorch", "-ltorch_cpu", "-lc10"]
SHARED = ["-shared", "-fPIC"]


def compile_host(name, *flags, libraries=()):
    """Compile tests/gpu/host/NAME.cpp; return the file."""
    source = SOURCES / f"{name}.cpp"
    headers = [*SOURCES.rglob("*.h"), *(ROOT / "csrc").glob("*.h")]
    headers += (ROOT / "csrc" / "cuda").rglob("*.*h")
    headers += (ROOT / "csrc" / "cuda" / "torch").glob("*.cpp")
    command = [COMPILER, *FLAGS, *flags, str(source), *libraries]
    return compiled(name, command, [source, *headers])


def compile_operators(*flags):
    """Compile the operators of csrc/cuda/torch for tensors of the CPU; return the library."""
    stand_ins = f"-I{SOURCES / 'stand_ins'}"
    return compile_host("operators", stand_ins, *OF_TORCH, *flags, *SHARED, libraries=LIBRARIES)


def compiled(name, command, sources):
    """Run a compiler unless it has run so on the very same sources; return the file it made."""
    if not shutil.which(COMPILER):
        cannot_run(f"there is no C++ compiler '{COMPILER}'")
    digest = hashlib.sha256(" ".join([torch.__version__, *command]).encode())
    for source in sorted(sources):
        digest.update(source.read_bytes())
    target = BUILT / f"{name}-{digest.hexdigest()[:16]}"
    if not target.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", partial], capture_output=True, text=True)
        if re.search(r"cannot find .*[atu]*san", done.stderr):
            cannot_run("the compiler comes without the libraries of its sanitizers")
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
        partial.rename(target)
    return target


def cannot_run(reason):
    if os.environ.get("CI"):
        pytest.fail(f"CI must run the CUDA kernels on the host, but {reason}")
    pytest.skip(reason)


def run_program(name, sanitizer, *arguments, warp=8):
    """Run tests/gpu/host/NAME.cpp under a sanitizer; return the finished run."""
    program = compile_host(name, f"-DFASTRL_HOST_WARP={warp}", *SANITIZERS[sanitizer])
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    command = [str(program), *arguments]
    options = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    done = subprocess.run(command, **options)
    if "unexpected memory mapping" in done.stderr:  # of some kernels, by older sanitizers
        done = subprocess.run(["setarch", "--addr-no-randomize", *command], **options)
    return done
