"""The table of what the drop-ins support is generated from their code."""

from pathlib import Path

import pytest

from fastrl.integrations.support import MEANINGS, Support, table

TABLE = Path(__file__).parents[2] / "docs" / "support.md"


def test_the_table_in_the_docs_is_up_to_date():
    assert TABLE.read_text() == table(), "python -m fastrl.integrations > docs/support.md"


def test_every_handling_is_explained():
    assert all(f"**{name}**" in table() for name in MEANINGS)


def test_an_unknown_handling_is_refused():
    with pytest.raises(ValueError, match=r"handling must be one of fused, .*got 'magic'"):
        Support(option="x", handling="magic")
