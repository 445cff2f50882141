"""The source distribution has the whole repository, and installs without the extension."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDERS = ("fastrl", "csrc", "tests", "bench", "docs", ".ci", ".github")
SOME = ("ops/test_value_loss.py", "repo/test_requirements.py")
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist')"
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


def run(folder, *command, **environment):
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **environment},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
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
    run(source, "-c", BUILD, FASTRL_BUILD="none")
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(target)
    (found,) = target.iterdir()
    return found


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
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    assert "tests/conftest.py" in names
    assert [name for name in names if not (unpacked / name).is_file()] == []


@pytest.mark.parametrize("arguments", [["--collect-only"], [f"tests/{name}" for name in SOME]])
def test_its_tests_are_collected_and_run(unpacked, arguments, monkeypatch):
    monkeypatch.delenv("CI", raising=False)  # the extension is not built there
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    last = run(unpacked, *command, PYTHONPATH=str(unpacked)).splitlines()[-1]
    assert "error" not in last
    assert int(last.split("/")[0].split()[0]) > (10 if len(arguments) > 1 else 3000)


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


def test_works_on_the_reference_backend_and_says_how_to_build_the_other(python, installed):
    printed = python("-c", CALLS)
    assert printed.startswith(f"tensor(True) {installed}")
    assert "compiler" in printed
    assert "pip install" in printed


def test_says_what_is_missing(python):
    (line,) = [line for line in python("-m", "fastrl").splitlines() if line.split()[0] == "cpu"]
    assert "not built" in line
    assert "compiler" in line
    assert "FASTRL_BUILD=cpu pip install" in line  # which shows why, where there is a compiler
