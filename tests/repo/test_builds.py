"""What a build of the extensions does: an installation goes on without what fails, `make` stops."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUILT = f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/fastrl"
CPU, CUDA = "_C.abi3.so", "_C_cuda.abi3.so"

BROKEN = """#!/bin/sh
case "$*" in *-version*) echo "g++ 12.2.0"; exit;; esac
echo "In file included from somewhere:"
echo "csrc/cpu/vocabulary/rows.cpp:7:1: error: no such intrinsic" >&2
echo "csrc/cpu/vocabulary/rows.cpp:9:1: error: another one" >&2
exit 1
"""
WORKING = """#!/bin/sh
case "$*" in *-version*) echo "g++ 12.2.0"; exit;; esac
while [ $# -gt 1 ]; do test "$1" = -o && : > "$2"; shift; done
"""
NVCC = """#!/bin/sh
test "$1" = -dryrun && echo "#\\$ TOP=$CUDA_HOME" >&2 && exit
test "$1" = --list-gpu-code && echo sm_90 && exit
echo "csrc/cuda/gae/gae.cu(12): error: no such identifier"
exit 2
"""
WAYS = {
    "wheel": "from setuptools import build_meta; print(build_meta.build_wheel('dist'))",
    "editable": "from setuptools import build_meta; print(build_meta.build_editable('dist'))",
    "inplace": "import runpy, sys; sys.argv[1:] = ['build_ext', '--inplace']; "
    "runpy.run_path('setup.py')",
}
NO_CPU = "fastrl: installing without the compiled CPU backend, because "
NO_CUDA = "fastrl: installing without the CUDA extension, because "
OF_CPU = "csrc/cpu/vocabulary/rows.cpp:7:1: error: no such intrinsic"
OF_CUDA = "csrc/cuda/gae/gae.cu(12): error: no such identifier"
NO_RUNTIME = "there is no libcudart_static.a"


class Build(NamedTuple):
    """A build where extensions of an earlier one lie, and what it says and leaves."""

    way: str
    choice: str
    compiler: str
    said: tuple[str, ...]
    left: set[str] | None = None  # None: it fails
    ninja: bool = True
    toolkit: str = ""  # "compiler", or "compiler and runtime"


BUILDS = {
    "wheel": Build("wheel", "auto", BROKEN, (NO_CPU, f"does not compile it: {OF_CPU}."), set()),
    "editable": Build("editable", "auto", BROKEN, (NO_CPU, "another one"), set()),
    "in place without ninja": Build(
        "inplace", "auto", BROKEN, (NO_CPU, OF_CPU, "FASTRL_BUILD=cpu makes"), set(), ninja=False
    ),
    "cpu was asked for": Build("inplace", "cpu", BROKEN, (OF_CPU,)),
    "nothing may fail": Build("inplace", "strict", BROKEN, (OF_CPU,)),
    "no compiler": Build(
        "inplace", "auto", "", (f"{NO_CPU}there is no C++ compiler 'no-such-compiler'.",), {CUDA}
    ),
    "nvcc fails": Build(
        "inplace", "auto", WORKING, (NO_CUDA, OF_CUDA), {CPU}, toolkit="compiler and runtime"
    ),
    "nvcc may not fail": Build(
        "inplace", "strict", WORKING, (OF_CUDA,), toolkit="compiler and runtime"
    ),
    "no runtime": Build(
        "inplace", "auto", WORKING, (NO_CUDA, NO_RUNTIME), {CPU}, toolkit="compiler"
    ),
    "cuda without nvcc": Build("inplace", "cuda", WORKING, ("but there is no nvcc",)),
    "unknown": Build(
        "inplace", "gpu", WORKING, ("must be auto, strict, none, cpu or cuda, got 'gpu'",)
    ),
    "a wheel": Build("wheel", "cpu", WORKING, (), {CPU}),
}


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def source(tmp_path):
    """A copy of the sources with extensions of an earlier build."""
    source = tmp_path / "source"
    built = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("fastrl", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=built)
    for name in ("pyproject.toml", "setup.py", "Makefile", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / BUILT).mkdir(parents=True)
    for folder in (source / "fastrl", source / BUILT):
        for name in (CPU, CUDA):
            (folder / name).write_text("of an earlier build")
            os.utime(folder / name, (0, 0))
    return source


def run(source, *command, **environment):
    return subprocess.run(
        command,
        cwd=source,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )


def in_tree(source):
    return {path.name for path in (source / "fastrl").glob("*.so")}


@pytest.mark.parametrize("what", BUILDS)
def test_build(what, source):
    how, home = BUILDS[what], source.parent / "toolkit"
    home.mkdir()
    environment = {"CUDA_HOME": str(home), "FASTRL_BUILD": how.choice, "MAX_JOBS": "1"}
    if how.compiler:
        environment["CXX"] = program(source.parent / "bin" / "fake++", how.compiler)
    else:
        environment["CXX"] = "no-such-compiler"
        os.utime(source / "fastrl" / CUDA)  # newer than the sources, so it may stay
    if how.toolkit:
        program(home / "bin" / "nvcc", NVCC)
    if "runtime" in how.toolkit:
        program(home / "lib64" / "libcudart_static.a", "")
    with_ninja = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["PATH"] = with_ninja if how.ninja else "/usr/bin:/bin"
    version = "13.0" if how.toolkit else None
    code = f"import torch; torch.version.cuda = {version!r}; {WAYS[how.way]}"
    done = run(source, sys.executable, "-c", code, **environment)
    assert all(one in done.stdout for one in how.said), done.stdout
    assert (done.returncode == 0) == (how.left is not None), done.stdout
    if how.left is None:
        assert "installing without" not in done.stdout
    elif how.way == "wheel":
        kind = "-cp310-abi3-" if how.left else "-py3-none-any"
        (wheel,) = (source / "dist").glob(f"*{kind}*.whl")
        names = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
        assert names == {f"fastrl/{name}" for name in how.left}
    else:
        assert in_tree(source) == how.left


def test_make_stops_at_a_failed_compilation(source):
    """It names the way to do without the extension. The test fakes installation and compiler."""
    (source / "venv" / "bin").mkdir(parents=True)
    (source / "venv" / "bin" / "python").symlink_to(sys.executable)
    (source / "venv" / ".torch-asked").write_text("torch\n")
    (source / "venv" / ".installed-torch").touch()
    environment = {
        "CUDA_HOME": str(source),  # which has no nvcc
        "CXX": program(source.parent / "bin" / "fake++", BROKEN),
        "PYTHONPATH": os.pathsep.join(sys.path[1:]),
    }
    # without the variables that a surrounding `make test` sets
    make = ["env", *(f"-u{name}" for name in os.environ if "MAKE" in name), "-uFASTRL_BUILD"]
    make += ["make", "VENV=venv", "TORCH=torch"]
    done = run(source, *make, "venv/.extension-built", **environment)
    assert done.returncode != 0
    assert OF_CPU in done.stdout
    assert "FASTRL_BUILD=none" in done.stdout
    assert not (source / "venv" / ".extension-built").exists()
    assert in_tree(source)
    done = run(source, *make, "FASTRL_BUILD=none", "without-extension", **environment)
    assert done.returncode == 0
    assert in_tree(source) == set()
