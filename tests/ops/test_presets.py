"""docs/losses.md lists the presets."""

from pathlib import Path

from fastrl.objective.presets import CONVENTIONS, convention_table

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"


def test_the_table_in_the_docs_is_generated_from_the_code():
    assert convention_table() in PAGE.read_text()


def test_every_convention_has_a_column():
    assert all(f"`{name}`" in convention_table() for name in CONVENTIONS if name != "fastrl")
