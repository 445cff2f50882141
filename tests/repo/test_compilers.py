"""The sources in C++ with the compilers that are installed: the oldest supported, and for CUDA.

The oldest are g++ 11 and clang 13. The tests of `make targets` compile the kernels.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from fastrl import native

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OF_CPU = sorted((ROOT / "csrc" / "cpu").rglob("*.cpp"))
OF_CUDA = [path for path in (ROOT / "csrc/cuda/torch").glob("*.cpp") if path.stem != "bind"]
#: For `__builtin_cpu_supports`; compilers reject later names, such as "f16c" before clang 17.
KNOWN_FEATURES = {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
OLD = [f"clang++-{version}" for version in range(13, 17)] + ["g++-11"]
NVCC = shutil.which("nvcc")
COMPILER = os.environ.get("CXX", "c++")
needs_nvcc = pytest.mark.skipif(
    NVCC is None or not shutil.which(COMPILER),
    reason=f"there is no nvcc, and so no CUDA runtime to compile for, or no '{COMPILER}'",
)


def compile_with(compiler, sources, *flags, system=()):
    (version,) = re.findall(r'"TORCH_TARGET_VERSION", "(0x\w+)"', (ROOT / "setup.py").read_text())
    command = [compiler, "-std=c++17", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    command += [f"-DTORCH_TARGET_VERSION={version}", f"-I{ROOT / 'csrc'}"]
    command += [flag for place in system for flag in ("-isystem", place)]
    command += [*map(str, sources), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def toolkit():
    command = [NVCC, "-dryrun", "-x", "cu", os.devnull]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    (top,) = re.findall(r"^#\$ TOP=(.*)$", told.stderr, re.MULTILINE)
    return top


def test_old_compilers_know_every_cpu_feature():
    code = [line.partition("//")[0] for path in OF_CPU for line in path.read_text().splitlines()]
    asked = {name for x in code for name in re.findall(r'__builtin_cpu_supports\("(\w+)"\)', x)}
    assert asked
    assert asked <= KNOWN_FEATURES


@pytest.mark.parametrize("compiler", OLD)
def test_an_old_compiler_compiles_the_sources(compiler):
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    places = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    compile_with(compiler, OF_CPU, "-fsyntax-only", system=places)


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
    program = str(tmp_path / "ask")
    compile_with(COMPILER, [tmp_path / "ask.cpp"], "-o", program, system=[f"{toolkit()}/include"])

    def clusters(version, cluster, shared_bytes=100000):
        numbers = map(str, (version, cluster, shared_bytes))
        return subprocess.run([program, *numbers]).returncode

    assert [clusters(version, 8) for version in (80, 89, 90, 100)] == [0, 0, 16, 16]
    assert [clusters(version, 1) for version in (80, 89, 90, 100)] == [0, 0, 132, 132]
    assert [clusters(90, cluster, 232449) for cluster in (1, 8)] == [0, 0]


@needs_nvcc
def test_the_operators_compile_and_register(tmp_path):
    """Loaded lazily and without the kernels: CUDA symbols are not resolved before a call."""
    operators = str(tmp_path / "operators.so")
    flags = ["-shared", "-fPIC", "-DUSE_CUDA", "-Wno-unused-parameter", "-o", operators]
    flags += [f"-L{place}" for place in cpp_extension.library_paths()]
    flags += ["-ltorch", "-ltorch_cpu", "-lc10"]
    places = [*cpp_extension.include_paths(), f"{toolkit()}/include"]
    compile_with(COMPILER, OF_CUDA, *flags, system=places)
    load = f"""
import ctypes, os, torch
from fastrl import library
ctypes.CDLL({operators!r}, mode=os.RTLD_LAZY)
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
