"""The documents for developers name files and environment variables that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
ENVIRONMENT = (ROOT / "docs" / "environment.md").read_text()
EXTENDING = (ROOT / "docs" / "extending.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()

PATH = re.compile(r"\b(?:fastrl|csrc|tests|bench|docs)/[\w./*]*\w[\w.*]*(?![\w.*<-])")
#: A file in a folder of fastrl/ops.
IN_OPS = re.compile(r"(?<![\w/])_\w+/\w+\.py")
#: How Python, C++ and the Makefile read a variable of the environment.
READS = re.compile(
    r"""environ(?:\.get\(|\.setdefault\(|\[)"(\w+)"|"(\w+)"\ (?:not\ )?in\ os\.environ
    |getenv\("(\w+)"\)|^(\w+)\ \?=|export\ (\w+)\ \?=""",
    flags=re.MULTILINE | re.VERBOSE,
)
READERS = (
    "fastrl/**/*.py",
    "bench/**/*.py",
    "tests/**/*.py",
    "csrc/**/*.*",
    "setup.py",
    "Makefile",
)


def paths():
    found = {*PATH.findall(ARCHITECTURE + EXTENDING + CONTRIBUTING)}
    return sorted(found | {f"fastrl/ops/{path}" for path in IN_OPS.findall(ARCHITECTURE)})


@pytest.mark.parametrize("path", paths())
def test_every_path_exists(path):
    assert list(ROOT.glob(path)), path


@pytest.fixture(scope="module")
def sources():
    return [path.read_text() for reader in READERS for path in sorted(ROOT.glob(reader))]


@pytest.fixture(scope="module")
def listed():
    rows = re.findall(r"^\| (`.*?) \|", ENVIRONMENT, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_environment_variable_is_listed(sources, listed):
    read = {name for text in sources for groups in READS.findall(text) for name in groups if name}
    assert len(read) >= 30
    assert read - {"PATH"} <= listed


def test_every_listed_environment_variable_is_in_the_sources(sources, listed):
    words = {word for text in sources for word in re.findall(r"\w+", text)}
    # trackers.py makes these of the tracker's name
    assert listed - {"WANDB_PROJECT", "TRACKIO_PROJECT"} <= words
