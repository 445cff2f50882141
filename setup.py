"""Build the compiled extensions; everything else about the package is in pyproject.toml.

FASTRL_BUILD=auto   build `fastrl._C` if torch and a C++ compiler are installed, and
                    `fastrl._C_cuda` if nvcc and a CUDA build of torch are, too; skip what does not
                    compile and say why (default)
FASTRL_BUILD=strict the same, but a failed compilation is an error: for development
FASTRL_BUILD=cpu    build only `fastrl._C`, or fail
FASTRL_BUILD=cuda   build both, or fail; needs nvcc, but neither a GPU nor a CUDA build of torch
FASTRL_BUILD=none   pure Python: the reference and Triton backends

TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX" selects the GPUs to compile for, CUDA_HOME the toolkit, CXX the
C++ compiler, and MAX_JOBS how many files nvcc compiles in parallel.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from glob import glob
from pathlib import Path

import setuptools

# pip does not look at the build requirements of pyproject.toml when it builds without isolation
if int(setuptools.__version__.partition(".")[0]) < 77:
    raise SystemExit(
        "fastrl is built with setuptools 77 or newer, and this Python has "
        f"{setuptools.__version__}: pip install 'setuptools>=77'"
    )

from setuptools import setup
from setuptools.errors import CompileError

CPU_SOURCES = ["csrc/bind.cpp", *sorted(glob("csrc/cpu/*/*.cpp"))]
HEADERS = sorted([*glob("csrc/*.h"), *glob("csrc/cpu/**/*.h", recursive=True)])
# The operators, which use torch, are C++; the kernels and their launches are CUDA without torch.
CUDA_OPERATORS = sorted(glob("csrc/cuda/torch/*.cpp"))
CUDA_KERNELS = sorted(glob("csrc/cuda/*/*.cu"))
CUDA_HEADERS = sorted([*glob("csrc/*.h"), *glob("csrc/cuda/*/*.h"), *glob("csrc/cuda/*/*.cuh")])
# one binary for torch 2.10 and all later
MACROS = [("TORCH_TARGET_VERSION", "0x020a000000000000")]
COMPILE_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=fast",  # fused multiply-adds in the vector code, which has no intrinsic for them
    "-fno-math-errno",
    "-fvisibility=hidden",
    f"-ffile-prefix-map={Path(__file__).resolve().parent}/=",  # no build paths in messages
]
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden,-g0"]
# a cubin also runs on later GPUs of its generation; the last PTX is for later generations
CUDA_ARCHS = ["8.0", "9.0", "10.0+PTX"]
COMPILER = os.environ.get("CXX") or "c++"
#: By extension: its name in messages, and the value of FASTRL_BUILD that requires it.
BACKENDS = {
    "fastrl._C": ("compiled CPU backend", "cpu"),
    "fastrl._C_cuda": ("CUDA extension", "cuda"),
}


def why_not() -> str:
    """Return why the extension cannot be built here, as a clause, or ''."""
    if sys.platform == "win32":
        return "its vector code needs GCC or Clang, not MSVC"
    if not shutil.which(COMPILER.split()[0]):
        return f"there is no C++ compiler '{COMPILER.split()[0]}'"
    # pip hides installed packages from an isolated build, but the torch to build for is among them
    sys.path.append(sysconfig.get_path("purelib"))
    try:
        import torch.utils.cpp_extension  # noqa: F401
    except (ImportError, OSError):  # OSError: a library that torch links is missing
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
    """Return the toolkit's root as nvcc reports it; nvcc itself may be a link or a script."""
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
    """Return the folder of the static CUDA runtime."""
    for place in ("lib64", "lib", "targets/*/lib", "lib/*-linux-gnu"):
        for found in cuda.glob(f"{place}/libcudart_static.a"):
            return str(found.parent)
    raise SystemExit(f"fastrl: there is no libcudart_static.a in the CUDA toolkit at {cuda}")


def arch_flags(compiler: str) -> list[str]:
    """Return the nvcc flags for the GPUs to compile for."""
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    archs = re.split("[;, ]+", chosen) if chosen else CUDA_ARCHS
    if not all(re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch) for arch in archs):
        raise SystemExit(
            f'TORCH_CUDA_ARCH_LIST must list versions as in "8.0;9.0+PTX", got {chosen!r}'
        )
    numbers = dict.fromkeys(arch.removesuffix("+PTX").replace(".", "") for arch in archs)
    # an older nvcc lacks the newest GPUs; a list made for torch may contain GPUs that are too old
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
    toolkit = str(toolkit_folder(compiler))  # another toolkit generates different code
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
            raise CompileError(f"nvcc could not compile {source}; see its output above")
        return target

    jobs = int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count()
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(compiled, CUDA_KERNELS))


def leave_out(name: str, reason: str) -> None:
    """Print that an extension is not built, and why."""
    print(f"fastrl: installing without the {BACKENDS[name][0]}, because {reason}.", flush=True)


@contextmanager
def recorded(printed: list[str]) -> Iterator[None]:
    """Collect the output of this process and its compilers in `printed`, and show it at the end."""
    sys.stdout.flush()
    sys.stderr.flush()
    shown = [os.dup(descriptor) for descriptor in (1, 2)]
    with tempfile.TemporaryFile() as record:
        for descriptor in (1, 2):
            os.dup2(record.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, before in zip((1, 2), shown, strict=True):
                os.dup2(before, descriptor)
                os.close(before)
            record.seek(0)
            text = record.read()
            printed.append(text.decode(errors="backslashreplace"))
            with open(1, "wb", closefd=False) as out:
                out.write(text)


def why_it_failed(error: BaseException, printed: str = "") -> str:
    """Return the first error line of a compiler, or else the first line of the exception."""
    said = re.search(r"^.*\b(error|fatal)\s*:.*$", printed, re.MULTILINE)
    line = said[0] if said else (str(error).splitlines() or [type(error).__name__])[0]
    return line.removeprefix("fastrl: ").strip().rstrip(".")


def files_of(name: str, folder: str = ".") -> list[str]:
    """Return the files of an extension under a folder, for any Python version."""
    return glob(os.path.join(folder, *name.split(".")) + ".*so")


def outdated(name: str) -> list[str]:
    """Return the files of an extension in the source tree that are older than the sources."""
    newest = max(os.path.getmtime(path) for path in glob("csrc/**/*.*", recursive=True))
    return [path for path in files_of(name) if os.path.getmtime(path) < newest]


def remove(paths: list[str]) -> None:
    """Remove files of an earlier build, which would be packaged or loaded as if they were new."""
    for path in paths:
        print(f"fastrl: removing {os.path.normpath(path)}, left by an earlier build", flush=True)
        os.remove(path)


def cuda_extension(choice: str) -> dict[str, object]:
    """Return the build options of the CUDA extension; {} if it is not built."""
    if choice == "cpu":
        return {}
    if choice != "cuda":
        import torch

        if torch.version.cuda is None:
            return {}
        if not nvcc():
            leave_out("fastrl._C_cuda", "there is no nvcc")
            return {}
    elif not nvcc():
        raise SystemExit("FASTRL_BUILD=cuda, but there is no nvcc: install the CUDA toolkit.")
    try:
        toolkit = toolkit_folder(nvcc())
        return {
            "include_dirs": [str(toolkit / "include")],
            "library_dirs": [runtime_folder(toolkit)],
            "libraries": ["cudart_static", "rt", "dl", "pthread"],
            # libtorch pulls in torch's CUDA libraries, if it has any
            "extra_link_args": ["-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", "-ltorch"],
        }
    except (SystemExit, OSError) as error:
        if choice != "auto":
            raise
        leave_out("fastrl._C_cuda", why_it_failed(error))
        return {}


def extensions() -> dict[str, object]:
    """Return the arguments of setup() that build the extensions; {} for pure Python."""
    choice = os.environ.get("FASTRL_BUILD") or "auto"
    if choice not in ("auto", "strict", "none", "cpu", "cuda"):
        raise SystemExit(f"FASTRL_BUILD must be auto, strict, none, cpu or cuda, got {choice!r}")
    if choice == "none":
        return {}
    reason = why_not()
    if reason and choice not in ("auto", "strict"):
        raise SystemExit(f"FASTRL_BUILD={choice}, but {reason}.")
    if reason:
        leave_out("fastrl._C", reason)
        if {"build_ext", "editable_wheel"} & {*sys.argv}:  # the source tree is what is imported
            remove([path for name in BACKENDS for path in outdated(name)])
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

    class Build(BuildExtension):
        """Compiles the CUDA kernels with nvcc first, since torch does so only in its CUDA builds.

        With `auto` it skips extensions that do not compile.
        """

        def build_extensions(self) -> None:
            self.failed: list[str] = []
            with self.excused(*self.extensions):
                super().build_extensions()
            self.extensions = [one for one in self.extensions if one.name not in self.failed]
            self.distribution.ext_modules = self.extensions
            for name in self.not_made():
                remove(files_of(name, self.build_lib))
            wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
            if wheel and not self.extensions and not self.editable_mode:
                wheel.root_is_pure = True

        def build_extension(self, extension: object) -> None:
            with self.excused(extension):
                if extension.name == "fastrl._C_cuda":
                    extension.extra_objects = compile_kernels(self.build_temp)
                super().build_extension(extension)

        @contextmanager
        def excused(self, *extensions: object) -> Iterator[None]:
            """With `auto`, an error skips these extensions."""
            printed: list[str] = []
            try:
                with recorded(printed) if choice == "auto" else nullcontext():
                    yield
            except (Exception, SystemExit) as error:
                if choice != "auto":
                    raise
                why = why_it_failed(error, "".join(printed))
                for name in [one.name for one in extensions if one.name not in self.failed]:
                    self.failed.append(name)
                    _, needed = BACKENDS[name]
                    compilers = f"{nvcc()} with {COMPILER}" if needed == "cuda" else COMPILER
                    leave_out(name, f"{compilers} does not compile it: {why}")
                    print(f"fastrl: FASTRL_BUILD={needed} makes that an error.", flush=True)

        def not_made(self) -> set[str]:
            return {*BACKENDS} - {extension.name for extension in self.extensions}

        def copy_extensions_to_source(self) -> None:
            super().copy_extensions_to_source()
            for name in self.not_made():
                remove(files_of(name) if name in self.failed else outdated(name))

    modules = [module("fastrl._C", CPU_SOURCES, depends=HEADERS)]
    if toolkit := cuda_extension(choice):
        macros = [*MACROS, ("USE_CUDA", "1")]
        depends = [*CUDA_HEADERS, *CUDA_KERNELS]
        modules.append(module("fastrl._C_cuda", CUDA_OPERATORS, macros, depends=depends, **toolkit))
    return {
        "ext_modules": modules,
        "cmdclass": {"build_ext": Build.with_options(use_ninja=bool(shutil.which("ninja")))},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extensions())
