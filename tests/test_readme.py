"""What README and examples show runs as it stands; the README names everything public."""

import inspect
import re
from pathlib import Path

import pytest

import fastrl

ROOT = Path(__file__).parent.parent
README, EXAMPLES = ((ROOT / name).read_text() for name in ("README.md", "docs/examples.md"))
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README + EXAMPLES, flags=re.DOTALL | re.MULTILINE)


def test_there_are_examples():
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1][:40])
def test_example_runs(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_every_public_function_is_named():
    functions = [name for name in fastrl.__all__ if inspect.isroutine(getattr(fastrl, name))]
    assert [name for name in functions if f"`{name}`" not in README] == []


def test_fits_on_a_few_screens():
    assert len(README.splitlines()) <= 200
