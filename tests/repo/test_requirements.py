"""The versions in pyproject.toml, the Makefile and continuous integration are consistent."""

import importlib.metadata
import re
from pathlib import Path

import pytest

import fastrl

ROOT = Path(__file__).parents[2]
MAKEFILE, PROJECT, CI, WHEELS = (
    (ROOT / name).read_text()
    for name in (
        "Makefile",
        "pyproject.toml",
        ".github/workflows/ci.yml",
        ".github/workflows/wheels.yml",
    )
)
TRITON_OF = dict(re.findall(r"(\d+\.\d+):(\d+\.\d+\.\d+)", MAKEFILE))


def test_triton_is_not_pinned():
    """For a pin, pip would replace a torch that requires another version, and test that one."""
    found = re.findall(r'"(triton\b[^";]*)', PROJECT)
    assert found
    assert [requirement for requirement in found if "==" in requirement] == []


def test_the_makefile_lists_the_triton_that_the_installed_torch_requires():
    torch = importlib.metadata.version("torch").rsplit(".", 1)[0].partition("+")[0]
    required = [one for one in importlib.metadata.requires("torch") or () if "triton" in one]
    if not required:
        pytest.skip("this is a CPU build of torch, which requires no Triton")
    named = TRITON_OF.get(".".join(torch.split(".")[:2]))
    assert named is not None
    assert re.search(rf"[=~]= ?{re.escape(named)}\b", required[0])


def test_ci_runs_the_oldest_and_the_newest_torch():
    minors = sorted(TRITON_OF, key=lambda version: int(version.split(".")[1]))
    assert f'"torch>={minors[0]}"' in PROJECT
    for minor in (minors[0], minors[-1]):
        for workflow in (CI, WHEELS):
            assert re.search(rf'torch: "{re.escape(minor)}\.\d+"', workflow), minor
        assert re.search(rf"^TORCHES .*torch=={re.escape(minor)}\.\d+", MAKEFILE, re.MULTILINE)


def test_wheels_are_compiled_with_the_oldest_torch():
    """Its headers declare no function that it lacks."""
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', PROJECT)
    assert re.search(rf"^pip install .* torch=={re.escape(oldest)}\.\d+ ", PROJECT, re.MULTILINE)
    (minimum,) = re.findall(r'"TORCH_TARGET_VERSION", "0x0(\w{3})', (ROOT / "setup.py").read_text())
    assert oldest == f"{int(minimum[0], 16)}.{int(minimum[1:], 16)}"


def test_one_version_of_fastrl():
    (named,) = re.findall(r'^version = "(.*)"', PROJECT, re.MULTILINE)
    cited = re.findall(r"^version: (.*)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert [fastrl.__version__, *cited] == [named, named]


def test_one_version_of_cibuildwheel():
    """What a person can run is what the workflow runs."""
    (named,) = re.findall(r"cibuildwheel==[\d.]+", PROJECT)
    assert re.findall(r"cibuildwheel==[\d.]+", WHEELS) == [named]
