"""The source distribution contains the whole repository, and its tests run."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDERS = ("fastrl", "csrc", "tests", "bench", "docs", ".ci", ".github")
SOME = (
    "ops/test_masked.py",
    "ops/test_properties.py",
    "repo/test_readme.py",
    "repo/test_requirements.py",
)


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
    subprocess.run(
        [sys.executable, "-c", "from setuptools import build_meta as b; b.build_sdist('dist')"],
        cwd=source,
        env={**os.environ, "FASTRL_BUILD": "none"},
        check=True,
        timeout=120,
    )
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(target)
    (found,) = target.iterdir()
    return found


def run(unpacked, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    environment.pop("CI", None)  # the extension is not built there
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=unpacked,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_contains_every_file_of_the_repository(unpacked):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    assert "tests/conftest.py" in names
    assert [name for name in names if not (unpacked / name).is_file()] == []


def test_all_of_its_tests_are_collected(unpacked):
    counted = run(unpacked, "--collect-only").splitlines()[-1]
    assert "error" not in counted
    assert int(counted.split("/")[0].split()[0]) > 3000


def test_some_of_its_tests_run(unpacked):
    done = run(unpacked, *(f"tests/{name}" for name in SOME)).splitlines()[-1]
    assert int(done.split()[0]) > 100
    assert "failed" not in done
