"""How fastrl's commands start: what they set before torch is loaded, and what they keep quiet."""

import os
import re
import subprocess
import sys

import pytest

from fastrl import command_start, console, doctor
from tests.integrations.packages import needed

#: Packages that warn when they are imported, in each way.
NOISY = """
import logging, sys, warnings

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("numpy", "transformers", "peft"):
            warnings.warn(f"{name} is loud")
            logging.getLogger(name).warning(f"{name} is loud")

sys.meta_path.insert(0, Finder)
"""
MISSING = ["--model", "/no/such/model", "--steps", "1"]


def run(folder, *command, **environment):
    """Return what a command of Python prints to both streams, and its status."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "PYTHONPATH")}
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, *command], env={**inherited, "PYTHONPATH": path, **environment},
        capture_output=True, text=True, check=False, timeout=300, cwd=folder,
    )  # fmt: skip
    return done.stdout, done.stderr, done.returncode


@pytest.fixture
def noisy(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NOISY)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["-m", "fastrl", "--version"], ""),
        (["-m", "fastrl", "grpo", *MISSING], r"error: .*/no/such/model.*\n"),
        (["-m", "fastrl.train.grpo", *MISSING], r"error: .*/no/such/model.*\n"),
    ],
    ids=["version", "fastrl grpo", "fastrl.train.grpo"],
)
def test_a_command_prints_no_warnings_of_the_packages_that_it_loads(noisy, command, said):
    if "grpo" in str(command):
        needed("transformers")
    printed = run(noisy, *command)[1]
    assert re.fullmatch(said, printed), printed


def test_in_a_program_that_imports_fastrl_nothing_is_kept_quiet(noisy):
    pytest.importorskip("numpy")
    _, printed, status = run(noisy, "-c", "import fastrl, logging; logging.warning('mine')")
    assert status == 0
    assert printed.count("numpy is loud") >= 2
    assert "mine" in printed


def test_what_is_quiet_ends(capsys):
    code = "import warnings, logging; warnings.warn('a'); logging.getLogger('b').warning('c')"
    with command_start.quiet():
        exec(code)
    with pytest.warns(UserWarning, match="a"):
        exec(code)
    assert capsys.readouterr().err == ""
    assert command_start.logging.root.manager.disable == 0


@pytest.mark.parametrize(
    ("arguments", "original", "words"),
    [
        (["-m", "--seed", "1"], "python -m fastrl.train.grpo --seed 1", ["grpo", "--seed", "1"]),
        (["-m", "ppo"], "python -u -mfastrl ppo", ["ppo"]),
        (["-m", "--quick"], "python -m fastrl.bench --quick", ["bench", "--quick"]),
        (["/usr/bin/fastrl", "doctor"], "python /usr/bin/fastrl doctor", ["doctor"]),
        (["-m", "-m", "fastrl"], "python -m pytest -m fastrl", None),
        (["mine.py", "-m", "fastrl.train.grpo"], "python mine.py -m fastrl.train.grpo", None),
        (["-c"], "python -c pass", None),
        ([], "python", None),
    ],
)
def test_commands_of_fastrl_are_told_from_other_programs(arguments, original, words):
    assert command_start.words(arguments, original.split()) == words


@pytest.mark.parametrize(
    ("command", "environment", "count"),
    [
        (["-m", "fastrl", "grpo", "--help"], {}, "300"),
        (["-m", "fastrl.train.ppo", "--help"], {"GOMP_SPINCOUNT": "7"}, "7"),
        (["-m", "fastrl", "grpo", "--help"], {"OMP_WAIT_POLICY": "active"}, None),
        (["-m", "fastrl", "bench", "--help"], {}, None),
        (["-c", "import fastrl"], {}, None),
    ],
)
def test_threads_of_a_training_loop_sleep_while_they_wait(tmp_path, command, environment, count):
    needed("transformers")
    printed = run(tmp_path, *command, OMP_DISPLAY_ENV="verbose", **environment)[1]
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", printed)
    if found is None:
        pytest.skip("torch's OpenMP is not GNU's")
    assert found[1] == count if count else found[1] not in ("300", "7")


def test_the_loops_that_start_so_are_all():
    assert {*command_start.LOOPS} == {*console.LOOPS}


def test_the_doctor_lists_packages_for_users_below_one_another(monkeypatch):
    required = ["mkdocs>=1.6", "tensorboard>=2.15", "datasets>=4"]
    extras = zip(required, ("docs", "tensorboard", "data"), strict=True)
    listed = [f"{one}; extra == '{extra}'" for one, extra in extras]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: listed)
    lines = doctor._packages()[1:]
    assert [line.split()[0] for line in lines] == ["tensorboard", "data"]
    assert lines[0].rindex("tensorboard") == lines[1].index("datasets")
