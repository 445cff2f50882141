"""A failed compilation: an installation continues without the extension, `make` stops."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUILT = f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/fastrl"

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
WHEEL = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
EDITABLE = "from setuptools import build_meta; print(build_meta.build_editable('dist'))"
INPLACE = "import runpy, sys; sys.argv[1:] = ['build_ext', '--inplace']; runpy.run_path('setup.py')"
FOR_CPU = "import torch; torch.version.cuda = None; "
FOR_CUDA = "import torch; torch.version.cuda = '13.0'; "
WAYS = {"wheel": WHEEL, "editable": EDITABLE, "inplace": INPLACE}


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def source(tmp_path):
    """A copy of the sources with extensions left by an earlier build."""
    source = tmp_path / "source"
    built = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("fastrl", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=built)
    for name in ("pyproject.toml", "setup.py", "Makefile", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / BUILT).mkdir(parents=True)
    for folder in (source / "fastrl", source / BUILT):
        for name in ("_C.abi3.so", "_C_cuda.abi3.so"):
            (folder / name).write_text("of an earlier build")
            os.utime(folder / name, (0, 0))
    return source


def build(source, way, compiler, choice="auto", **environment):
    return subprocess.run(
        [sys.executable, "-c", way if "torch" in way else FOR_CPU + way],
        cwd=source,
        env={
            **os.environ,
            "CXX": program(source.parent / "bin" / "fake++", compiler),
            "FASTRL_BUILD": choice,
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )


def in_tree(source):
    return {path.name: path.read_text() for path in (source / "fastrl").glob("*.so")}


@pytest.mark.parametrize("ninja", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_an_installation_continues_and_says_why(source, way, ninja):
    path = "/usr/bin:/bin"
    if ninja:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = build(source, WAYS[way], BROKEN, PATH=path)
    assert done.returncode == 0, done.stdout
    (reason,) = [line for line in done.stdout.splitlines() if "because" in line]
    assert reason.startswith("fastrl: installing without the compiled CPU backend, because ")
    assert reason.endswith(
        "fake++ does not compile it: csrc/cpu/vocabulary/rows.cpp:7:1: error: no such intrinsic."
    )
    assert "fastrl: FASTRL_BUILD=cpu makes that an error." in done.stdout
    assert "another one" in done.stdout  # the full output of the compiler is shown
    if way == "wheel":
        (wheel,) = (source / "dist").glob("*.whl")
        assert wheel.name.endswith("-py3-none-any.whl")
        assert [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")] == []
    else:
        assert in_tree(source) == {}


@pytest.mark.parametrize("choice", ["cpu", "strict"])
def test_a_requested_extension_fails_loudly(source, choice):
    done = build(source, INPLACE, BROKEN, choice)
    assert done.returncode != 0
    assert "csrc/cpu/vocabulary/rows.cpp:7:1: error: no such intrinsic" in done.stdout
    assert "installing without" not in done.stdout


@pytest.mark.parametrize("choice", ["auto", "strict"])
@pytest.mark.parametrize("flaw", ["nvcc fails", "no runtime"])
def test_the_cpu_backend_stays_where_the_cuda_extension_fails(source, choice, flaw):
    home = source.parent / "toolkit"
    program(home / "bin" / "nvcc", NVCC)
    if flaw == "nvcc fails":
        program(home / "lib64" / "libcudart_static.a", "")
    done = build(source, FOR_CUDA + INPLACE, WORKING, choice, CUDA_HOME=str(home), MAX_JOBS="1")
    reason = "no libcudart_static.a"
    if flaw == "nvcc fails":
        reason = "csrc/cuda/gae/gae.cu(12): error: no such identifier"
    assert reason in done.stdout
    if choice == "strict":
        assert done.returncode != 0
        return
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "because" in line]
    assert line.startswith("fastrl: installing without the CUDA extension, because ")
    assert reason in line
    assert in_tree(source) == {"_C.abi3.so": ""}


def test_no_extension_of_an_earlier_build_is_packaged(source):
    done = build(source, WHEEL, WORKING, "cpu")
    assert done.returncode == 0, done.stdout
    (wheel,) = (source / "dist").glob("*-cp310-abi3-*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert names == ["fastrl/_C.abi3.so"]


def test_without_a_compiler_outdated_extensions_are_removed(source):
    newer = source / "fastrl" / "_C_cuda.abi3.so"
    os.utime(newer)
    done = build(source, INPLACE, BROKEN, CXX="no-such-compiler")
    assert done.returncode == 0, done.stdout
    assert "because there is no C++ compiler 'no-such-compiler'." in done.stdout
    assert list(in_tree(source)) == [newer.name]


def test_make_stops_at_a_failed_compilation(source):
    """It names the way to do without the extension. The test fakes installation and compiler."""
    (source / "venv" / "bin").mkdir(parents=True)
    (source / "venv" / "bin" / "python").symlink_to(sys.executable)
    (source / "venv" / ".torch-asked").write_text("torch\n")
    (source / "venv" / ".installed-torch").touch()
    make = ["make", "VENV=venv", "TORCH=torch", "venv/.extension-built"]
    environment = {name: value for name, value in os.environ.items() if name != "FASTRL_BUILD"}
    # without the variables that a surrounding `make test` sets
    environment = {name: value for name, value in environment.items() if "MAKE" not in name}
    environment["CUDA_HOME"] = str(source)  # which has no nvcc
    environment["CXX"] = program(source.parent / "bin" / "fake++", BROKEN)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path[1:])

    def run(*command):
        return subprocess.run(
            command, cwd=source, env=environment, capture_output=True, text=True, check=False
        )

    done = run(*make)
    assert done.returncode != 0
    assert "csrc/cpu/vocabulary/rows.cpp:7:1: error: no such intrinsic" in done.stdout
    assert "FASTRL_BUILD=none" in done.stdout
    assert not (source / "venv" / ".extension-built").exists()
    assert in_tree(source)
    assert run("make", "VENV=venv", "FASTRL_BUILD=none", "without-extension").returncode == 0
    assert in_tree(source) == {}
