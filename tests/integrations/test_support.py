"""The document of what the drop-ins support agrees with their code."""

import importlib
import re
from pathlib import Path

import pytest

from fastrl.integrations.support import updated
from fastrl.integrations.verl import _REPLACEMENTS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "support.md").read_text()


def test_the_table_of_trl_is_up_to_date():
    assert updated(DOCUMENT) == DOCUMENT, "python -m fastrl.integrations docs/support.md"


def test_the_table_of_verl_has_every_function_that_is_replaced():
    section = DOCUMENT.partition("`fastrl.integrations.verl`")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:3] for row in section.splitlines()]
    found = [re.findall(r"`([\w.]+)`", row[0]) for row in rows if "".join(row[1:]) == " replaced "]
    named = {name for names in found for name in names}
    assert {item.name for item in _REPLACEMENTS} <= named


@pytest.mark.parametrize("name", ["openrlhf", "nemo_rl", "torchrl", "liger"])
def test_a_drop_in_has_a_row_for_each_of_its_functions(name):
    module = importlib.import_module(f"fastrl.integrations.{name}")
    section = DOCUMENT.partition(f"`{module.__name__}`")[2].partition("\n## ")[0]
    public = [
        key
        for key, value in vars(module).items()
        if getattr(value, "__module__", "").startswith(module.__name__)
        and key[0] != "_"
        and key != "use_fastrl"
    ]
    assert public
    assert [key for key in public if key not in section] == []
