"""Wheels as users get them: installed where there is only torch, tested outside of the checkout.

python -m tests.wheels dist/*.whl --torch torch==2.10.0 torch==2.15.0 -- -x -k gae
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What pytest reads: the tests, the documents that they compare with, and its settings.
TAKEN = ("tests", "docs", "pyproject.toml")
TOOLS = ("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "numpy")
BUILT = ("fastrl/_C.abi3.so", "fastrl/_C_cuda.abi3.so")
#: The one fastrl that can be imported, and why its extensions cannot be used.
ASK = """
import fastrl, torch
from fastrl import native
why_not = native.missing, native.cuda_missing
print(torch.__version__, fastrl.__file__, torch.version.cuda, *why_not, sep="\\n")
"""


def main() -> None:
    """Check every wheel with every torch; the first failure ends it."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path, help="files of wheels")
    parser.add_argument("--torch", nargs="+", default=["torch"], help="requirements, for pip")
    parser.add_argument("--environments", type=Path, help="a folder that keeps the environments")
    parser.add_argument(
        "--tests", nargs="+", default=["tests/ops"], help="files or folders of tests"
    )
    options = parser.parse_args(arguments[:end])
    with tempfile.TemporaryDirectory() as folder:
        for torch in options.torch:
            python = environment((options.environments or Path(folder)) / torch, torch)
            for wheel in options.wheels:
                print(f"\n{wheel.name} with {torch}", flush=True)
                check(wheel.resolve(), python, options.tests, arguments[end + 1 :])


def environment(folder: Path, torch: str) -> Path:
    """Return the Python of an environment with torch and what runs tests, and nothing else."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        run(python, "-m", "pip", "install", "-q", torch, *TOOLS)
    return python


def check(wheel: Path, python: Path, tests: list[str], pytest: list[str]) -> None:
    """Install a wheel and run tests on it, from a folder that has tests but no fastrl."""
    names = zipfile.ZipFile(wheel).namelist()
    built = [name for name in BUILT if name in names]
    assert bool(built) == ("-cp310-abi3-" in wheel.name), f"it is not tagged for {built}"
    ours = ("ls-files", "fastrl")
    committed = subprocess.run(("git", *ours), cwd=ROOT, capture_output=True, text=True, check=True)
    lacking = {*committed.stdout.splitlines()} - {*names}
    assert not lacking, f"it lacks {lacking}"
    run(python, "-m", "pip", "uninstall", "-q", "-y", "fastrl-kernels")
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel)  # no other torch
    run(python, "-m", "pip", "check")
    run(python.with_name("fastrl"), "--version")
    with tempfile.TemporaryDirectory() as elsewhere:
        for name in TAKEN:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(elsewhere) / name)
        told = run(python, "-c", ASK, cwd=elsewhere).splitlines()
        print(*told, sep="\n", flush=True)
        _, place, cuda, cpu_missing, cuda_missing = told
        assert Path(place).is_relative_to(python.parents[1]), f"{place} is imported"
        assert (cpu_missing == "None") == (BUILT[0] in built), cpu_missing
        if cuda != "None":
            assert (cuda_missing == "None") == (BUILT[1] in built), cuda_missing
        backends = "reference cpu" if built else "reference"
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *pytest, *tests)
        run(python, *command, cwd=elsewhere, shown=True, FASTRL_TESTED=backends)


def run(
    program: Path, *arguments: object, cwd: str | None = None, shown: bool = False, **variables: str
) -> str:
    """Run a program without the variables that would show it this checkout; return its output."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CI")}
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        cwd=cwd,
        env={**clean, **variables},
        stdout=None if shown else subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout or ""


if __name__ == "__main__":
    main()
