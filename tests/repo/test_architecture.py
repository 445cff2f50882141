"""The documents for developers name files and environment variables that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()

PATH = re.compile(r"\b(?:fastrl|csrc|tests|bench|docs)/[\w./*]*\w[\w.*]*(?![\w.*<-])")
#: How Python, C++ and the Makefile read a variable of the environment.
READS = re.compile(
    r"""environ(?:\.get\(|\[)"(\w+)"|getenv\("(\w+)"\)|^(\w+)\ \?=""",
    flags=re.MULTILINE | re.VERBOSE,
)
READERS = ("fastrl/**/*.py", "bench/*.py", "tests/**/*.py", "csrc/**/*.*", "setup.py", "Makefile")


@pytest.mark.parametrize("path", sorted({*PATH.findall(ARCHITECTURE), *PATH.findall(CONTRIBUTING)}))
def test_every_path_exists(path):
    assert list(ROOT.glob(path)), path


def test_every_environment_variable_is_listed():
    texts = [path.read_text() for reader in READERS for path in sorted(ROOT.glob(reader))]
    read = {name for text in texts for groups in READS.findall(text) for name in groups if name}
    section = ARCHITECTURE.partition("## Environment variables")[2]
    listed = set(re.findall(r"`([A-Z0-9_]{2,})`", section))
    assert len(read) >= 10
    assert read - {"PATH"} <= listed
