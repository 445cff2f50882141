"""Builds the CUDA kernels for the CPU: csrc/cuda against the host machine in tests/cuda/host.

A program tests/cuda/NAME.cpp includes kernels and checks itself in `main`, which the sanitizers
run; its `extern "C"` functions serve the tests in Python, through ctypes.

What this cannot show, but a GPU does: that the device version of the primitives does what the host
version does, above all its instructions for clusters, bulk copies and the order of memory between
them and the threads (`fence_bulk` does nothing here), and how many clusters a device holds.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "cuda"
BUILT = ROOT / "build" / "cuda-host"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = [
    "-std=c++20",
    "-g",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
    f"-I{ROOT / 'csrc'}",
    f"-I{SOURCES}",
    '-DFASTRL_HOST_PRIMITIVES="host/primitives.h"',
]
SANITIZERS = {
    "address": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread", "-fno-sanitize-recover=all"],
}
SHARED = ["-shared", "-fPIC"]


def compile_host(name, *flags):
    """Compile tests/cuda/NAME.cpp; return the file."""
    source = SOURCES / f"{name}.cpp"
    headers = [*SOURCES.rglob("*.h"), *(ROOT / "csrc").glob("*.h")]
    headers += (ROOT / "csrc" / "cuda").rglob("*.*h")
    return compiled(name, [COMPILER, *FLAGS, *flags, str(source)], [source, *headers])


def compiled(name, command, sources):
    """Run a compiler unless it has run so on the very same sources; return the file it made."""
    if not shutil.which(COMPILER):
        cannot_run(f"there is no C++ compiler '{COMPILER}'")
    digest = hashlib.sha256(" ".join(command).encode())
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


@functools.cache
def library(name):
    """Return tests/cuda/NAME.cpp as a ctypes library."""
    return ctypes.CDLL(str(compile_host(name, *library_flags)))


#: How `library` compiles, and who hears what each launch is given; sanitized.py changes both.
library_flags = ["-O1", *SHARED]
launched = None
_ON_LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def call(program, name, params, *others):
    """Call a function of tests/cuda/PROGRAM.cpp with the address of a struct and more."""
    built, struct = library(program), type(params).__name__
    size_of = getattr(built, f"size_of_{struct}")
    size_of.restype = ctypes.c_int64
    assert size_of() == ctypes.sizeof(params), f"{struct} differs from the one in C++"
    if launched is not None:
        heard = _ON_LAUNCH(lambda at: launched(type(params).from_address(at)))
        built.hear_launches(heard)
    status = getattr(built, name)(ctypes.byref(params), *others)
    assert status == 0, f"{name} returned {status}"


@contextlib.contextmanager
def watched(program, *tensors):
    """Count the loads and stores of each byte of one or two tensors by tests/cuda/PROGRAM.cpp.

    Yields a pair of counts per tensor, with a row per element.
    """
    watch = library(program).watch

    def counts_of(place, x):
        size = x.element_size()
        counts = [torch.zeros(x.numel() * size, dtype=torch.uint8) for _ in range(2)]
        begin, *places = (ctypes.c_void_p(y.data_ptr()) for y in (x, *counts))
        watch(place, begin, ctypes.c_int64(x.numel() * size), *places)
        return [count.view(-1, size) for count in counts]

    try:
        yield [counts_of(*pair) for pair in enumerate(tensors)]
    finally:
        for place in range(len(tensors)):
            watch(place, None, ctypes.c_int64(0), None, None)


def run_program(name, sanitizer=None, *arguments, warp=8):
    """Run the program's own checks, under a sanitizer if one is named; return the finished run."""
    flags = SANITIZERS[sanitizer] if sanitizer else ["-O1"]
    program = compile_host(name, f"-DFASTRL_HOST_WARP={warp}", *flags)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    command = [str(program), *arguments]
    options = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    done = subprocess.run(command, **options)
    if "unexpected memory mapping" in done.stderr:  # of some kernels, by older sanitizers
        done = subprocess.run(["setarch", "--addr-no-randomize", *command], **options)
    return done


def assert_program_passes(name, sanitizer=None, warp=8):
    """Run tests/cuda/NAME.cpp and show what it said if it fails."""
    done = run_program(name, sanitizer, warp=warp)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
