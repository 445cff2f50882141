"""The versions that pyproject.toml, the Makefile and continuous integration name fit together."""

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE, PROJECT, CI = (
    (ROOT / name).read_text() for name in ("Makefile", "pyproject.toml", ".github/workflows/ci.yml")
)
TRITON_OF = dict(re.findall(r"(\d+\.\d+):(\d+\.\d+\.\d+)", MAKEFILE))


def test_no_pin_of_triton_stands_beside_a_torch_that_brings_another():
    """pip would replace that torch, to install both, and the tests would run on the other one."""
    found = re.findall(r'"(triton\b[^";]*)', PROJECT)
    assert found
    assert [requirement for requirement in found if "==" in requirement] == []


def test_what_make_installs_later_is_held_to_the_torch_that_was_asked_for(tmp_path):
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


def test_another_torch_is_installed_where_one_was(tmp_path):
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


def test_the_named_triton_is_the_one_that_the_installed_torch_requires():
    torch = importlib.metadata.version("torch").rsplit(".", 1)[0].partition("+")[0]
    required = [one for one in importlib.metadata.requires("torch") or () if "triton" in one]
    if not required:
        pytest.skip("this torch is for CPUs, and requires no Triton")
    named = TRITON_OF.get(".".join(torch.split(".")[:2]))
    assert named is not None
    assert re.search(rf"[=~]= ?{re.escape(named)}\b", required[0])


def test_ci_runs_the_oldest_and_the_newest_torch():
    minors = sorted(TRITON_OF, key=lambda version: int(version.split(".")[1]))
    assert f'"torch>={minors[0]}"' in PROJECT
    for minor in (minors[0], minors[-1]):
        assert re.search(rf'torch: "{re.escape(minor)}\.\d+"', CI), minor
