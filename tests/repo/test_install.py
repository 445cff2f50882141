"""An installation without the compiled extension works, and says what is missing."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "fastrl", "csrc", "tests")


@pytest.fixture(scope="module")
def without_extension(tmp_path_factory):
    """Run Python where the only fastrl to import is an installation without extensions."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    built = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=built)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = "-m pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check"
    command = [sys.executable, *pip.split(), "--target", str(target), str(source)]
    subprocess.run(command, env={**os.environ, "FASTRL_BUILD": "none"}, check=True, timeout=120)

    def run(*arguments):
        # -S ignores .pth files, so that an editable installation is not found
        places = (str(target), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        environment.pop("FASTRL_BACKEND", None)
        done = subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=target,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.target = target
    return run


def test_installs_every_module_and_the_type_marker(without_extension):
    expected = {path.relative_to(ROOT) for path in (ROOT / "fastrl").rglob("*.py")}
    expected |= {Path("fastrl/py.typed"), Path("fastrl/train/report.html")}
    target = without_extension.target
    found = {path.relative_to(target) for path in target.rglob("fastrl/**/*") if path.is_file()}
    assert expected == {path for path in found if path.suffix != ".pyc"}
    installed = {path.name for path in target.iterdir() if not path.name.endswith(".dist-info")}
    assert installed - {"bin"} == {"fastrl"}  # and not the package `tests`


def test_works_on_the_reference_backend(without_extension):
    code = """
import fastrl, torch
logits = torch.randn(2, 3, 11, requires_grad=True)
token_ids = torch.randint(11, (2, 3))
mask = torch.ones(2, 3)
fastrl.logits_policy_loss(logits, token_ids, torch.tensor([1.0, -1.0]), mask).loss.backward()
expected = logits.detach().log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]
torch.testing.assert_close(fastrl.token_logprobs(logits, token_ids), expected)
print(logits.grad.abs().sum() > 0, fastrl.__file__)
"""
    printed = without_extension("-c", code)
    assert printed.startswith("tensor(True) " + str(without_extension.target))


def test_refuses_the_cpu_backend_and_says_how_to_build_it(without_extension):
    code = """
import fastrl, torch
try:
    fastrl.token_logprobs(torch.zeros(1, 3), torch.tensor([0]), backend="cpu")
except ValueError as error:
    print(error)
"""
    printed = without_extension("-c", code)
    assert "compiler" in printed
    assert "pip install" in printed


def test_says_what_is_missing(without_extension):
    printed = without_extension("-m", "fastrl")
    (line,) = [line for line in printed.splitlines() if line.split()[0] == "cpu"]
    assert "not built" in line
    assert "compiler" in line
    assert "FASTRL_BUILD=cpu pip install" in line  # which shows why, where there is a compiler
