"""The source distribution has the repository, and builds: what fails, and what does without it.

An installation goes on without an extension that does not compile, `make` stops.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDERS = ("fastrl", "csrc", "tests", "bench", "docs", ".ci", ".github")
BUILT = f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/fastrl"
CPU, CUDA = "_C.abi3.so", "_C_cuda.abi3.so"

COMPILER = """#!/bin/sh
case "$*" in *-version*) echo "g++ 12.2.0"; exit;; esac
"""
BROKEN = f"""{COMPILER}
echo "In file included from somewhere:"
echo "csrc/cpu/vocabulary/rows.cpp:7:1: error: no such intrinsic" >&2
echo "csrc/cpu/vocabulary/rows.cpp:9:1: error: another one" >&2
exit 1
"""
WORKING = f"""{COMPILER}
while [ $# -gt 1 ]; do test "$1" = -o && : > "$2"; shift; done
"""
#: Tells the folder of TOOLKIT, lists the GPUs in GPUS, or fails, or notes a compilation in COUNT.
NVCC = """#!/bin/sh
test "$1" = -dryrun && echo "#\\$ TOP=${TOOLKIT-$CUDA_HOME}" >&2 && exit
test "$1" = --list-gpu-code && printf 'sm_%s\\n' ${GPUS-90} && exit
test -z "$COUNT" && echo "csrc/cuda/gae/gae.cu(12): error: no such identifier" && exit 2
while [ $# -gt 1 ]; do test "$1" = -o && touch "$2" && echo >> "$COUNT"; shift; done
"""
BUILD = "from setuptools import build_meta as b; b.build_{}('dist')"
WAYS = {
    **{way: BUILD.format(way) for way in ("sdist", "wheel", "editable")},
    "inplace": "import runpy, sys; sys.argv[1:] = ['build_ext', '--inplace']; "
    "runpy.run_path('setup.py')",
}
NO_CPU = "fastrl: installing without the compiled CPU backend, because "
NO_CUDA = "fastrl: installing without the CUDA extension, because "
OF_CPU = "csrc/cpu/vocabulary/rows.cpp:7:1: error: no such intrinsic"
OF_CUDA = "csrc/cuda/gae/gae.cu(12): error: no such identifier"


class Build(NamedTuple):
    """A build where extensions of an earlier one lie, and what it says and leaves."""

    said: tuple[str, ...]
    left: set[str] | None  # None: it fails
    compiler: str = BROKEN
    choice: str = "auto"
    way: str = "inplace"
    ninja: bool = True
    toolkit: str = ""  # "compiler", or "compiler and runtime"


BOTH = "compiler and runtime"
BUILDS = {
    "wheel": Build((NO_CPU, f"does not compile it: {OF_CPU}."), set(), way="wheel"),
    "editable": Build((NO_CPU, "another one"), set(), way="editable"),
    "no ninja": Build((NO_CPU, OF_CPU, "FASTRL_BUILD=cpu makes"), set(), ninja=False),
    "cpu was asked for": Build((OF_CPU,), None, choice="cpu"),
    "nothing may fail": Build((OF_CPU,), None, choice="strict"),
    "no compiler": Build((f"{NO_CPU}there is no C++ compiler 'no-such-compiler'.",), {CUDA}, ""),
    "nvcc fails": Build((NO_CUDA, OF_CUDA), {CPU}, WORKING, toolkit=BOTH),
    "nvcc may not fail": Build((OF_CUDA,), None, WORKING, "strict", toolkit=BOTH),
    "no runtime": Build(
        (NO_CUDA, "there is no libcudart_static.a"), {CPU}, WORKING, toolkit="compiler"
    ),
    "cuda without nvcc": Build(("but there is no nvcc",), None, WORKING, "cuda"),
    "unknown": Build(("must be auto, strict, none, cpu or cuda, got 'gpu'",), None, WORKING, "gpu"),
    "a wheel": Build((), {CPU}, WORKING, "cpu", way="wheel"),
}


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def attempt(folder, *command, **environment):
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, timeout=600,
    )  # fmt: skip


def run(folder, *command, **environment):
    done = attempt(folder, sys.executable, *command, **environment)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A source distribution built without torch, a compiler or an earlier build, unpacked."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    built = shutil.ignore_patterns("*.so", "__pycache__")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
        elif path.name in FOLDERS:
            shutil.copytree(path, source / path.name, ignore=built)
    run(source, "-c", WAYS["sdist"], FASTRL_BUILD="none")
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(target)
    (found,) = target.iterdir()
    return found


# --- without the extensions


@pytest.fixture(scope="module")
def installed(unpacked, tmp_path_factory):
    """A folder where the distribution is installed."""
    target = tmp_path_factory.mktemp("installed")
    pip = "-m pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check"
    run(unpacked, *pip.split(), "--target", str(target), str(unpacked), FASTRL_BUILD="none")
    return target


@pytest.fixture
def python(installed, monkeypatch):
    """A function that runs Python where the only fastrl to import is the installed one."""
    monkeypatch.delenv("FASTRL_BACKEND", raising=False)
    # -S ignores .pth files, so that an editable installation is not found
    places = (str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return lambda *command: run(installed, "-S", *command, PYTHONPATH=os.pathsep.join(places))


def test_contains_every_file_of_the_repository(unpacked):
    listed = attempt(ROOT, "git", "ls-files", "--cached", "--others", "--exclude-standard")
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    assert "tests/conftest.py" in names
    assert [name for name in names if not (unpacked / name).is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        (["--collect-only"], 3000),
        (["tests/ops/test_value_loss.py", "tests/repo/test_requirements.py"], 10),
    ],
)
def test_its_tests_are_collected_and_run(unpacked, arguments, least, monkeypatch):
    monkeypatch.delenv("CI", raising=False)  # the extension is not built there
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    last = run(unpacked, *command, PYTHONPATH=str(unpacked)).splitlines()[-1]
    assert "error" not in last
    assert int(last.split("/")[0].split()[0]) > least


def test_installs_every_file_of_the_package(installed):
    """Modules, the type marker and data."""

    def files(folder):
        paths = (folder / "fastrl").rglob("*.*")
        built = (".so", ".pyc")
        return {path.relative_to(folder) for path in paths if path.suffix not in built}

    assert Path("fastrl/train/report.html") in files(ROOT)
    assert files(installed) == files(ROOT)
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names - {"bin"} == {"fastrl"}  # and not the package `tests`


#: What works without the extension, and what is refused.
CALLS = """
import fastrl, torch
logits = torch.randn(2, 3, 11, requires_grad=True)
token_ids = torch.randint(11, (2, 3))
mask = torch.ones(2, 3)
fastrl.logits_policy_loss(logits, token_ids, torch.tensor([1.0, -1.0]), mask).loss.backward()
expected = logits.detach().log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]
torch.testing.assert_close(fastrl.token_logprobs(logits, token_ids), expected)
print(logits.grad.abs().sum() > 0, fastrl.__file__)
try:
    fastrl.token_logprobs(torch.zeros(1, 3), torch.tensor([0]), backend="cpu")
except ValueError as error:
    print(error)
"""


def test_works_on_the_reference_backend_and_says_how_to_build_the_other(python, installed):
    printed = python("-c", CALLS)
    place = printed.partition("tensor(True) ")[2]
    assert place.startswith(str(installed))
    assert "compiler" in printed
    assert "pip install" in printed
    (line,) = [line for line in python("-m", "fastrl").splitlines() if line.split()[:1] == ["cpu"]]
    assert "not built" in line
    assert "compiler" in line
    assert "FASTRL_BUILD=cpu pip install" in line  # which shows why, where there is a compiler


# --- with compilers that are scripts


@pytest.fixture
def source(unpacked, tmp_path):
    """A copy of what is compiled with extensions of an earlier build."""
    source = tmp_path / "source"
    unused = shutil.ignore_patterns("tests", "bench", "docs", "__pycache__", "*.egg-info", "build")
    shutil.copytree(unpacked, source, ignore=unused)
    (source / BUILT).mkdir(parents=True)
    for folder in (source / "fastrl", source / BUILT):
        for name in (CPU, CUDA):
            (folder / name).write_text("of an earlier build")
            os.utime(folder / name, (0, 0))
    return source


def in_tree(source):
    return {path.name for path in (source / "fastrl").glob("*.so")}


@pytest.mark.parametrize("how", BUILDS.values(), ids=BUILDS)
def test_build(how, source):
    home = source.parent / "toolkit"
    home.mkdir()
    environment = {"CUDA_HOME": str(home), "FASTRL_BUILD": how.choice, "MAX_JOBS": "1"}
    environment["CXX"] = "no-such-compiler"
    if how.compiler:
        environment["CXX"] = program(source.parent / "bin" / "fake++", how.compiler)
    else:
        os.utime(source / "fastrl" / CUDA)  # newer than the sources, so it may stay
    if how.toolkit:
        program(home / "bin" / "nvcc", NVCC)
    if "runtime" in how.toolkit:
        program(home / "lib64" / "libcudart_static.a", "")
    with_ninja = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["PATH"] = with_ninja if how.ninja else "/usr/bin:/bin"
    version = "13.0" if how.toolkit else None
    code = f"import torch; torch.version.cuda = {version!r}; {WAYS[how.way]}"
    done = attempt(source, sys.executable, "-c", code, **environment)
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
    done = attempt(source, *make, "venv/.extension-built", **environment)
    assert done.returncode != 0
    assert OF_CPU in done.stdout
    assert "FASTRL_BUILD=none" in done.stdout
    assert not (source / "venv" / ".extension-built").exists()
    assert in_tree(source)
    done = attempt(source, *make, "FASTRL_BUILD=none", "without-extension", **environment)
    assert done.returncode == 0
    assert in_tree(source) == set()


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """The names of setup.py, with a CUDA compiler that only notes what it is given."""
    program(tmp_path / "bin" / "nvcc", NVCC)
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


def test_every_source_is_in_the_build_and_every_launch_defined_as_declared(setup):
    """A shared library loads even if a function is missing; only a call would fail."""
    listed = [*setup["CPU_SOURCES"], *setup["CUDA_OPERATORS"], *setup["CUDA_KERNELS"]]
    sources = [path for path in Path("csrc").rglob("*.*") if path.suffix in (".cpp", ".cu")]
    assert sorted(listed) == sorted(map(str, sources))
    kernels = [path for path in sources if path.suffix == ".cu"]

    def found(*paths):
        signatures = re.findall(r"cudaError_t (\w+\([^)]*\))", " ".join(map(Path.read_text, paths)))
        return sorted(re.sub(r"\s+", " ", one) for one in signatures)

    declared = found(Path("csrc/cuda/torch/launches.h"))
    assert declared == found(*kernels)
    assert len(declared) == len(kernels)
