"""The document of what the drop-ins support agrees with their code."""

import re
from pathlib import Path

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
