"""The build of the CUDA extension: what is asked for is built or refused, and it registers.

The kernels themselves are compiled for every target by the tests of `make targets`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from fastrl import native

ROOT = Path(__file__).parent.parent
NVCC = shutil.which("nvcc")
COMPILER = os.environ.get("CXX", "c++")


def configure(**environment):
    return subprocess.run(
        [sys.executable, "setup.py", "--name"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_unknown_choice_is_refused():
    done = configure(FASTRL_BUILD="gpu")
    assert done.returncode != 0
    assert "FASTRL_BUILD must be auto, none, cpu or cuda, got 'gpu'" in done.stderr


@pytest.mark.skipif(native.missing is not None, reason=str(native.missing))
def test_cuda_without_a_toolkit_is_refused_with_the_reason():
    done = configure(FASTRL_BUILD="cuda", CUDA_HOME=str(ROOT / "docs"))
    assert done.returncode != 0
    assert "FASTRL_BUILD=cuda, but there is no nvcc" in done.stderr


def test_every_source_is_in_the_build():
    setup = (ROOT / "setup.py").read_text()
    sources = [*(ROOT / "csrc/cuda").glob("*.cpp"), *(ROOT / "csrc/cuda").glob("*.cu")]
    missing = [path.name for path in sources if f'"csrc/cuda/{path.name}"' not in setup]
    assert len(sources) > 1
    assert missing == []


def test_every_launch_is_defined_as_it_is_declared():
    """A shared library may lack a function until it is called: nothing else would tell."""
    signature = re.compile(r"cudaError_t (\w+\([^)]*\))")

    def found(*paths):
        text = " ".join(path.read_text() for path in paths)
        return sorted(re.sub(r"\s+", " ", one) for one in signature.findall(text))

    declared = found(ROOT / "csrc/cuda/launches.h")
    assert declared == found(*(ROOT / "csrc/cuda").glob("*.cu"))
    assert len(declared) == len(list((ROOT / "csrc/cuda").glob("*.cu")))


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc, and so no CUDA runtime to compile for")
@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"there is no C++ compiler '{COMPILER}'")
def test_the_operators_compile_and_register(tmp_path):
    """Without their kernels, and loaded lazily: no symbol of CUDA is looked for before a call."""
    told = subprocess.run(
        [NVCC, "-dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    )
    top = next(line for line in told.stderr.splitlines() if line.startswith("#$ TOP="))
    places = [*cpp_extension.include_paths(), f"{top.partition('=')[2]}/include"]
    version = [flag for flag in (ROOT / "setup.py").read_text().split('"') if "0x02" in flag]
    command = [COMPILER, "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall"]
    command += ["-Werror", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={version[0]}"]
    command += [flag for place in places for flag in ("-isystem", place)]
    sources = [path for path in (ROOT / "csrc/cuda").glob("*.cpp") if path.stem != "bind"]
    operators = tmp_path / "operators.so"
    command += [*map(str, sources), "-o", str(operators)]
    command += [f"-L{place}" for place in cpp_extension.library_paths()]
    subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
    load = f"""
import ctypes, os, torch
from fastrl import library
ctypes.CDLL({str(operators)!r}, mode=os.RTLD_LAZY)
names = [name for name in library._SCHEMAS if library._places(name)[-1].startswith("fastrl_cuda")]
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(sorted(name for name in names if not has("fastrl_cuda::" + name, "CUDA")))
"""
    done = subprocess.run(
        [sys.executable, "-c", load], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA")
def test_a_torch_without_cuda_is_named():
    assert native.cuda_missing == "this torch was built without CUDA"
