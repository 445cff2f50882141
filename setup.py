"""Build the compiled extensions; everything else about the package is in pyproject.toml.

FASTRL_BUILD=auto   build what this environment can: `fastrl._C` with torch and a C++ compiler,
                    `fastrl._C_cuda` with nvcc and a torch for CUDA besides (default)
FASTRL_BUILD=cpu    build the first alone, or fail
FASTRL_BUILD=cuda   build both, or fail; needs nvcc, but neither a GPU nor a torch for CUDA
FASTRL_BUILD=none   pure Python: the reference and Triton backends

TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX" chooses the GPUs to compile for, CUDA_HOME the toolkit and
MAX_JOBS how many files nvcc compiles at once.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import setup
from setuptools.errors import CompileError

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
# The operators, which see torch, are C++; the kernels and their launches, which do not, are CUDA.
CUDA_OPERATORS = [
    "csrc/cuda/bind.cpp",
    "csrc/cuda/gae.cpp",
    "csrc/cuda/group_advantages.cpp",
    "csrc/cuda/logits_policy_loss.cpp",
    "csrc/cuda/policy_loss.cpp",
    "csrc/cuda/token_stats.cpp",
    "csrc/cuda/zero_word.cpp",
]
CUDA_KERNELS = [
    "csrc/cuda/gae.cu",
    "csrc/cuda/group_advantages.cu",
    "csrc/cuda/logits_policy_loss.cu",
    "csrc/cuda/policy_loss.cu",
    "csrc/cuda/token_stats.cu",
    "csrc/cuda/token_stats_backward.cu",
]
CUDA_HEADERS = [
    "csrc/check.h",
    "csrc/objectives.h",
    *glob("csrc/cuda/*.h"),
    *glob("csrc/cuda/*.cuh"),
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
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden,-g0"]
# one cubin serves the later GPUs of its generation; PTX of the last serves the generations after
CUDA_ARCHS = ["8.0", "9.0", "10.0+PTX"]


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


def nvcc() -> str:
    """Return the CUDA compiler, or ''."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None) or ""


def toolkit_folder(compiler: str) -> Path:
    """Return the folder of headers and libraries; nvcc says where, it may be a link or script."""
    told = subprocess.run(
        [compiler, "-dryrun", "-x", "cu", os.devnull, "-o", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    top = re.search(r"^#\$ TOP=(.+)$", told.stderr, re.MULTILINE)
    if not top:
        raise SystemExit(f"fastrl: {compiler} does not work here: {told.stderr.strip()}")
    return Path(top[1]).resolve()


def runtime_folder(cuda: Path) -> str:
    """Return the folder of the CUDA runtime, which is linked statically."""
    for place in ("lib64", "lib", "targets/*/lib", "lib/*-linux-gnu"):
        for found in cuda.glob(f"{place}/libcudart_static.a"):
            return str(found.parent)
    raise SystemExit(f"fastrl: there is no libcudart_static.a in the CUDA toolkit at {cuda}")


def arch_flags(compiler: str) -> list[str]:
    """Return what nvcc is told about the GPUs to compile for."""
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    archs = re.split("[;, ]+", chosen) if chosen else CUDA_ARCHS
    if not all(re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch) for arch in archs):
        raise SystemExit(
            f'TORCH_CUDA_ARCH_LIST must list versions as in "8.0;9.0+PTX", got {chosen!r}'
        )
    numbers = dict.fromkeys(arch.removesuffix("+PTX").replace(".", "") for arch in archs)
    # an older nvcc does not know the newest GPUs; a list made for torch names GPUs too old for us
    listed = subprocess.run([compiler, "--list-gpu-code"], capture_output=True, text=True)
    able = [
        number
        for number in numbers
        if int(number.rstrip("af")) >= 80 and (chosen or f"sm_{number}" in listed.stdout.split())
    ]
    if not able:
        raise SystemExit(f"the CUDA kernels need sm_80 or newer, got {', '.join(archs)}")
    named = [arch.removesuffix("+PTX").replace(".", "") for arch in archs if arch.endswith("+PTX")]
    with_ptx = [number for number in able if number in named] if chosen else able[-1:]
    codes = [f"arch=compute_{number},code=sm_{number}" for number in able]
    codes += [f"arch=compute_{number},code=compute_{number}" for number in with_ptx]
    return [f"-gencode={code}" for code in codes]


def compile_kernels(folder: str) -> list[str]:
    """Compile the CUDA sources into `folder`; return the objects."""
    compiler = nvcc()
    flags = [*NVCC_FLAGS, *arch_flags(compiler)]
    newest = max(os.path.getmtime(name) for name in (*CUDA_HEADERS, __file__))
    toolkit = str(toolkit_folder(compiler))  # another one makes other code
    how = hashlib.sha256(" ".join([toolkit, *flags]).encode()).hexdigest()[:8]

    def compiled(source: str) -> str:
        target = os.path.join(folder, f"{source}.{how}.o")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.exists(target) and os.path.getmtime(target) > max(
            newest, os.path.getmtime(source)
        ):
            return target
        print(f"fastrl: nvcc {source}", flush=True)
        done = subprocess.run([compiler, *flags, "-c", source, "-o", target], check=False)
        if done.returncode:
            raise CompileError(f"nvcc could not compile {source}; its words are above")
        return target

    jobs = int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count()
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(compiled, CUDA_KERNELS))


def cuda_wanted(choice: str) -> bool:
    """Decide whether the CUDA extension is built too; fails if it must be and cannot."""
    if choice == "cpu":
        return False
    if choice == "auto":
        import torch

        if torch.version.cuda is None:
            return False
        if not nvcc():
            print("fastrl: installing without the CUDA extension, because there is no nvcc.")
            return False
    elif not nvcc():
        raise SystemExit("FASTRL_BUILD=cuda, but there is no nvcc: install the CUDA toolkit.")
    return True


def extensions() -> dict[str, object]:
    """Return what setup() needs to build the extensions; nothing for pure Python."""
    choice = os.environ.get("FASTRL_BUILD", "auto")
    if choice not in ("auto", "none", "cpu", "cuda"):
        raise SystemExit(f"FASTRL_BUILD must be auto, none, cpu or cuda, got {choice!r}")
    if choice == "none":
        return {}
    reason = why_not()
    if reason and choice != "auto":
        raise SystemExit(f"FASTRL_BUILD={choice}, but {reason}.")
    if reason:
        print(f"fastrl: installing without the compiled CPU backend, because {reason}.")
        return {}

    from torch.utils.cpp_extension import BuildExtension, CppExtension

    def module(
        name: str, sources: list[str], macros: list[tuple[str, str]] = MACROS, **options: object
    ) -> object:
        return CppExtension(
            name,
            sources,
            define_macros=macros,
            extra_compile_args=COMPILE_FLAGS,
            py_limited_api=True,
            **options,
        )

    class BuildWithKernels(BuildExtension):
        """Lets nvcc compile the kernels first: torch's own way needs a torch for CUDA."""

        def build_extension(self, extension: object) -> None:
            if extension.name == "fastrl._C_cuda":
                extension.extra_objects = compile_kernels(self.build_temp)
            super().build_extension(extension)

    modules = [module("fastrl._C", CPU_SOURCES, depends=HEADERS)]
    if cuda_wanted(choice):
        toolkit = toolkit_folder(nvcc())
        modules.append(
            module(
                "fastrl._C_cuda",
                CUDA_OPERATORS,
                [*MACROS, ("USE_CUDA", "1")],
                depends=[*CUDA_HEADERS, *CUDA_KERNELS],
                include_dirs=[str(toolkit / "include")],
                library_dirs=[runtime_folder(toolkit)],
                libraries=["cudart_static", "rt", "dl", "pthread"],
                # libtorch is what brings in the part of torch that knows CUDA, where there is one
                extra_link_args=["-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", "-ltorch"],
            )
        )
    return {
        "ext_modules": modules,
        "cmdclass": {
            "build_ext": BuildWithKernels.with_options(use_ninja=bool(shutil.which("ninja")))
        },
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extensions())
