"""What the pages that explain say of the code: formulas, excerpts, errors."""

import re
from pathlib import Path

from fastrl import Objective
from fastrl.objective.presets import PRESETS

ROOT = Path(__file__).parents[2]


def page(name):
    return (ROOT / "docs" / name).read_text()


def sections(text):
    """Return the headings of a page and what is below each."""
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_preset_has_a_formula_that_is_compared_a_section_and_a_row_of_names():
    found = sections(page("objectives.md"))
    compared = re.findall(r'^    "(\w+)": \(', found["The same in torch"], flags=re.MULTILINE)
    assert sorted(compared) == sorted(PRESETS)
    headings = " ".join(heading for heading in found if "`" in heading)
    assert sorted(re.findall(r"`(\w+)`", headings)) == sorted(PRESETS)
    first_cells = re.findall(r"^\| (`.*?) \|", found["Names in other trainers"], flags=re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    assert set(PRESETS) - named == {"m2po"}  # AReaL's alone, below the table


def test_the_page_of_objectives_has_every_paper_of_the_docstring():
    papers = set(re.findall(r"\d{4}\.\d{5}", Objective.preset.__doc__))
    assert len(papers) > 10
    assert papers - set(re.findall(r"/abs/(\d{4}\.\d{5})\)", page("objectives.md"))) == set()
