"""The versions in pyproject.toml, the Makefile and continuous integration are consistent."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE, PROJECT, CI = (
    (ROOT / name).read_text() for name in ("Makefile", "pyproject.toml", ".github/workflows/ci.yml")
)
TRITON_OF = dict(re.findall(r"(\d+\.\d+):(\d+\.\d+\.\d+)", MAKEFILE))


def test_triton_is_not_pinned():
    """For a pin, pip would replace a torch that requires another version, and test that one."""
    found = re.findall(r'"(triton\b[^";]*)', PROJECT)
    assert found
    assert [requirement for requirement in found if "==" in requirement] == []


def test_later_installations_of_make_keep_torch(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    command = [
        "make",
        "-n",
        f"VENV={tmp_path}",
        "TORCH=torch==2.10.0",
        f"{tmp_path}/.installed-test",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    installs = [line for line in done.stdout.splitlines() if " install " in line and "pip" in line]
    assert [f"-c {tmp_path}/constraints.txt" in line for line in installs] == [False, True]


def test_a_different_torch_is_reinstalled(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / ".torch-asked").write_text("torch==2.13.0\n")
    for name in ("bin/python", ".installed-torch"):
        (tmp_path / name).touch()
    for torch, installs in (("torch==2.13.0", False), ("torch==2.15.0", True)):
        subprocess.run(
            ["make", f"VENV={tmp_path}", f"TORCH={torch}", f"{tmp_path}/.torch-asked"],
            cwd=ROOT,
            check=True,
        )
        asked, installed = (tmp_path / name for name in (".torch-asked", ".installed-torch"))
        assert (asked.stat().st_mtime_ns > installed.stat().st_mtime_ns) == installs


def test_every_installation_asks_for_the_same_setuptools():
    texts = [PROJECT, MAKEFILE, *((ROOT / name).read_text() for name in ("README.md", "setup.py"))]
    assert [set(re.findall(r"setuptools>=(\d+)", text)) for text in texts] == [{"77"}] * 4


def test_setuptools_that_is_too_old_is_named(tmp_path):
    """Python 3.10 and 3.11 create environments with an older one."""
    (tmp_path / "setuptools.py").write_text('__version__ = "65.5.1"')
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.touch(mode=0o755)
    done = subprocess.run(
        ["make", "gpu-build", f"OUT={tmp_path}", f"GPU_PYTHON={sys.executable}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode
    assert "setuptools 77 or newer, and this Python has 65.5.1" in done.stdout
    assert "could not be compiled within" not in done.stdout


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
        assert re.search(rf'torch: "{re.escape(minor)}\.\d+"', CI), minor
