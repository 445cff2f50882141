"""The build of the CUDA extension: GPUs, sources and launches, and what the runtime is asked.

The tests of `make targets` compile the kernels for every target.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from fastrl import native

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc")
COMPILER = os.environ.get("CXX", "c++")
needs_nvcc = pytest.mark.skipif(
    NVCC is None or not shutil.which(COMPILER),
    reason=f"there is no nvcc, and so no CUDA runtime to compile for, or no '{COMPILER}'",
)
#: Lists the GPUs in GPUS, tells the folder of TOOLKIT, or notes a compilation.
COMPILES = """#!/bin/sh
test "$1" = --list-gpu-code && printf 'sm_%s\\n' $GPUS && exit
test "$1" = -dryrun && echo "#\\$ TOP=$TOOLKIT" >&2 && exit
while [ $# -gt 1 ]; do test "$1" = -o && touch "$2" && echo >> "$COUNT"; shift; done
"""


def toolkit():
    command = [NVCC, "-dryrun", "-x", "cu", os.devnull]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    (top,) = re.findall(r"^#\$ TOP=(.*)$", told.stderr, re.MULTILINE)
    return top


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """The names of setup.py, with a compiler that only notes what it is given."""
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "nvcc"
    compiler.write_text(COMPILES)
    compiler.chmod(0o755)
    environment = {"FASTRL_BUILD": "none", "CUDA_HOME": str(tmp_path), "MAX_JOBS": "1"}
    for name, value in {**environment, "COUNT": str(tmp_path / "count")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--name"])
    monkeypatch.chdir(ROOT)
    return runpy.run_path("setup.py")


@pytest.mark.parametrize(
    ("chosen", "known", "codes"),
    [
        ("", "80 90 100 120", ["sm_80", "sm_90", "sm_100", "compute_100"]),
        (" ", "80 90", ["sm_80", "sm_90", "compute_90"]),
        ("9.0a;10.0+PTX", "", ["sm_90a", "sm_100", "compute_100"]),
        ("9.0+PTX 12.0", "", ["sm_90", "sm_120", "compute_90"]),
        ("7.5+PTX;8.0, 8.0;9.0", "", ["sm_80", "sm_90"]),
        ("7.0;7.5", "", "7.0"),
        ("Hopper", "", "Hopper"),
        ("9", "", "9"),
    ],
)
def test_gpus_to_compile_for(setup, chosen, known, codes, monkeypatch):
    """The codes of a choice, or what the refusal of it names."""
    monkeypatch.setenv("GPUS", known)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", chosen)
    if type(codes) is str:
        with pytest.raises(SystemExit, match=codes):
            setup["arch_flags"](setup["nvcc"]())
        return
    flags = setup["arch_flags"](setup["nvcc"]())
    assert [flag.rpartition("=")[2] for flag in flags] == codes


def test_another_toolkit_recompiles(setup, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    for toolkit, compiled in (("12.9", 1), ("12.9", 1), ("13.0", 2)):
        monkeypatch.setenv("TOOLKIT", str(tmp_path / toolkit))
        objects = setup["compile_kernels"](str(tmp_path / "objects"))
        assert all(Path(one).exists() for one in objects)
        count = len((tmp_path / "count").read_text().splitlines())
        assert count == compiled * len(setup["CUDA_KERNELS"])


def test_every_source_is_in_the_build(setup):
    listed = [*setup["CPU_SOURCES"], *setup["CUDA_OPERATORS"], *setup["CUDA_KERNELS"]]
    sources = [path for path in Path("csrc").rglob("*.*") if path.suffix in (".cpp", ".cu")]
    assert sorted(listed) == sorted(map(str, sources))


def test_every_launch_is_defined_as_it_is_declared():
    """A shared library loads even if a function is missing; only a call would fail."""
    signature = re.compile(r"cudaError_t (\w+\([^)]*\))")

    def found(*paths):
        text = " ".join(path.read_text() for path in paths)
        return sorted(re.sub(r"\s+", " ", one) for one in signature.findall(text))

    declared = found(ROOT / "csrc/cuda/torch/launches.h")
    assert declared == found(*(ROOT / "csrc/cuda").rglob("*.cu"))
    assert len(declared) == len(list((ROOT / "csrc/cuda").rglob("*.cu")))


# What the runtime reports on an H100 for a kernel compiled from PTX of version argv[1].
ASK_THE_RUNTIME = """
#include <cuda_runtime.h>
#include <cstdlib>
namespace fastrl::cuda {
using Stream = cudaStream_t;
using Status = cudaError_t;
constexpr Status kSuccess = cudaSuccess;
struct DeviceLimits { int major, sms, shared_per_block, shared_per_sm, l2_bytes; };
struct LaunchShape { unsigned blocks, threads, cluster; size_t shared_bytes; };
}
#include "cuda/device/launch.cuh"
static int version, failures;
extern "C" {
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = version;
  attributes->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  const bool limit = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize;
  return limit && value != 232448 ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = 16;
  return failures-- > 0 ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448 : 0;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
}
static void kernel(int) {}
int main(int, char** argv) {
  using namespace fastrl::cuda;
  version = std::atoi(argv[1]);
  const unsigned cluster = std::atoi(argv[2]);
  const size_t shared_bytes = std::atoi(argv[3]);
  const DeviceLimits limits{9, 132, 232448, 233472, 50 << 20};
  const auto ask = [&] {
    return resident_clusters(kernel, {cluster, 256, cluster, shared_bytes}, limits);
  };
  failures = 1;
  if (cluster > 1 && ask() != 0) return 1;  // what failed is asked again
  failures = 0;
  const int clusters = ask();
  failures = 1;
  return ask() == clusters ? clusters : 2;  // what succeeded is not
}
"""


@needs_nvcc
def test_how_many_clusters_a_device_holds(tmp_path):
    """None of PTX for sm_80: it runs on an H100, but its cluster kernels are empty."""
    (tmp_path / "ask.cpp").write_text(ASK_THE_RUNTIME)
    command = [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    command += ["-isystem", f"{toolkit()}/include", "ask.cpp", "-o", "ask"]
    subprocess.run(command, check=True, cwd=tmp_path)

    def clusters(version, cluster, shared_bytes=100000):
        numbers = map(str, (version, cluster, shared_bytes))
        return subprocess.run([tmp_path / "ask", *numbers]).returncode

    assert [clusters(version, 8) for version in (80, 89, 90, 100)] == [0, 0, 16, 16]
    assert [clusters(version, 1) for version in (80, 89, 90, 100)] == [0, 0, 132, 132]
    assert [clusters(90, cluster, 232449) for cluster in (1, 8)] == [0, 0]


@needs_nvcc
def test_the_operators_compile_and_register(tmp_path):
    """Loaded lazily and without the kernels: CUDA symbols are not resolved before a call."""
    places = [*cpp_extension.include_paths(), f"{toolkit()}/include"]
    version = [flag for flag in (ROOT / "setup.py").read_text().split('"') if "0x02" in flag]
    command = [COMPILER, "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall"]
    command += ["-Werror", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={version[0]}"]
    command += [flag for place in places for flag in ("-isystem", place)]
    sources = [path for path in (ROOT / "csrc/cuda/torch").glob("*.cpp") if path.stem != "bind"]
    operators = tmp_path / "operators.so"
    command += [*map(str, sources), "-o", str(operators)]
    command += [f"-L{place}" for place in cpp_extension.library_paths()]
    subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
    load = f"""
import ctypes, os, torch
from fastrl import library
ctypes.CDLL({str(operators)!r}, mode=os.RTLD_LAZY)
declared = [full for name in library._SCHEMAS for full in library.qualified_names(name)]
has = torch._C._dispatch_has_kernel_for_dispatch_key
cuda = [full for full in declared if full.startswith("fastrl_cuda::")]
print(sorted(full for full in cuda if not has(full, "CUDA")))
"""
    done = subprocess.run(
        [sys.executable, "-c", load], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA")
def test_a_torch_without_cuda_is_named():
    assert native.cuda_missing == "this torch was built without CUDA"
