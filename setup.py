"""Build the compiled extension `fastrl._C`; everything else about the package is in pyproject.toml.

FASTRL_BUILD=auto   build the extension if this environment has torch and a C++ compiler (default)
FASTRL_BUILD=cpu    build it or fail
FASTRL_BUILD=none   pure Python: the reference and Triton backends
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

CPU_SOURCES = [
    "csrc/bind.cpp",
    "csrc/cpu/capability.cpp",
    "csrc/cpu/gae.cpp",
    "csrc/cpu/group_advantages.cpp",
    "csrc/cpu/kernels_avx2.cpp",
    "csrc/cpu/kernels_avx512.cpp",
    "csrc/cpu/kernels_plain.cpp",
    "csrc/cpu/logits_policy_loss.cpp",
    "csrc/cpu/mixed_matmul.cpp",
    "csrc/cpu/objective_eval.cpp",
    "csrc/cpu/policy_loss.cpp",
    "csrc/cpu/rows.cpp",
    "csrc/cpu/tile_matmul.cpp",
    "csrc/cpu/token_stats.cpp",
]
HEADERS = [
    "csrc/check.h",
    "csrc/objectives.h",
    "csrc/cpu/isa.h",
    "csrc/cpu/kernels.h",
    "csrc/cpu/large_pages.h",
    "csrc/cpu/logits.h",
    "csrc/cpu/parallel.h",
    "csrc/cpu/policy_tokens.h",
    "csrc/cpu/row_blocks.h",
    "csrc/cpu/rows.h",
    "csrc/cpu/sequences.h",
    "csrc/cpu/tile_matmul.h",
    "csrc/cpu/vec.h",
]
# one binary for torch 2.10 and all later
MACROS = [("TORCH_TARGET_VERSION", "0x020a000000000000")]
COMPILE_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=fast",  # multiply-adds in the vector code, which has no name for them
    "-fno-math-errno",
    "-fvisibility=hidden",
    f"-ffile-prefix-map={Path(__file__).resolve().parent}/=",  # no build paths in messages
]


def why_not() -> str:
    """Return one clause on what keeps the extension from being built here, or ''."""
    if sys.platform == "win32":
        return "its vector code needs GCC or Clang, not MSVC"
    compiler = os.environ.get("CXX", "c++").split()[0]
    if not shutil.which(compiler):
        return f"there is no C++ compiler '{compiler}'"
    # pip hides what is installed from an isolated build; the torch to build for is there
    sys.path.append(sysconfig.get_path("purelib"))
    try:
        import torch.utils.cpp_extension  # noqa: F401
    except ImportError:
        return (
            "torch cannot be imported in the build environment (install torch first, then use "
            "`pip install --no-build-isolation`)"
        )
    return ""


def extension() -> dict[str, object]:
    """Return what setup() needs to build the extension; nothing for pure Python."""
    choice = os.environ.get("FASTRL_BUILD", "auto")
    if choice == "cuda":
        raise SystemExit("FASTRL_BUILD=cuda: this version has no CUDA extension yet; use cpu")
    if choice not in ("auto", "none", "cpu"):
        raise SystemExit(f"FASTRL_BUILD must be auto, none or cpu, got {choice!r}")
    if choice == "none":
        return {}
    reason = why_not()
    if reason and choice == "cpu":
        raise SystemExit(f"FASTRL_BUILD=cpu, but {reason}.")
    if reason:
        print(f"fastrl: installing without the compiled CPU backend, because {reason}.")
        return {}

    from torch.utils.cpp_extension import BuildExtension, CppExtension

    module = CppExtension(
        "fastrl._C",
        CPU_SOURCES,
        depends=HEADERS,
        define_macros=MACROS,
        extra_compile_args=COMPILE_FLAGS,
        py_limited_api=True,
    )
    return {
        "ext_modules": [module],
        "cmdclass": {
            "build_ext": BuildExtension.with_options(use_ninja=bool(shutil.which("ninja")))
        },
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extension())
