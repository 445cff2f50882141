"""The table of what the drop-ins support is generated from their code."""

from pathlib import Path

from fastrl.integrations.support import table

TABLE = Path(__file__).parents[2] / "docs" / "support.md"


def test_the_table_in_the_docs_is_up_to_date():
    assert TABLE.read_text() == table(), "python -m fastrl.integrations > docs/support.md"
