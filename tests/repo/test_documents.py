"""What the pages that explain say of the code: formulas, excerpts, errors."""

import ast
import re
from pathlib import Path

import pytest

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


EXCERPT = re.compile(r'^```python title="([^"]*)"\n(.*?)^```$', flags=re.DOTALL | re.MULTILINE)
EXCERPTS = [
    (path.name, *found)
    for path in sorted((ROOT / "docs").rglob("*.md"))
    for found in EXCERPT.findall(path.read_text())
]


@pytest.mark.parametrize(("name", "source", "code"), EXCERPTS, ids=lambda text: text[-40:])
def test_an_excerpt_is_in_the_file_that_it_names(name, source, code):
    assert f"\n{code}" in (ROOT / source).read_text()


def test_the_kernel_is_explained_by_excerpts():
    assert sum(name == "how-a-kernel-works.md" for name, *_ in EXCERPTS) >= 10


def test_the_picture_of_fusing_has_the_bytes_that_are_counted():
    text = page("how-a-kernel-works.md")
    counted = re.findall(r"assert bytes_per_logit\(\w+\) == (\d+)", text)
    drawings = [page(f"pictures/fusing-{theme}.svg") for theme in ("light", "dark")]
    box = re.compile(r'class="(?:forward|backward)" .*? width="(\d+)".*?\n.*?>(\d+)<')
    for drawing in drawings:
        assert re.findall(r">(\d+) bytes<", drawing) == [*counted, "0"]
        rows = re.split(r'class="head"', drawing)[1:]
        for row, total in zip(rows, counted, strict=False):
            boxes = box.findall(row)
            assert all(int(width) == 28 * int(size) for width, size in boxes)
            assert sum(int(size) for _, size in boxes) == int(total)
    colour = re.compile(r"#[0-9a-f]{6}")
    assert len({colour.sub("", drawing) for drawing in drawings}) == 1


def texts_of(node):
    """Yield the strings of a module, with ... where something is formatted into them."""
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif isinstance(child, ast.JoinedStr):
            yield "".join(x.value if isinstance(x, ast.Constant) else "..." for x in child.values)


def messages_of(text):
    """Return the first cells of the tables that are headed `message`."""
    tables = re.findall(r"^\| message \|.*\n\|[- |]+\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return [row.split("|")[1].strip() for table in tables for row in table.splitlines()]


@pytest.fixture(scope="module")
def raised():
    """The texts of all modules that a user may meet."""
    modules = (ROOT / "fastrl").rglob("*.py")
    return [text for path in modules for text in texts_of(ast.parse(path.read_text()))]


def is_in_order(parts, text):
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


@pytest.mark.parametrize("message", messages_of(page("errors.md")))
def test_the_errors_of_the_page_are_those_of_the_code(message, raised):
    assert re.fullmatch(r"`[^`]+`", message)
    parts = message.strip("`").split("...")
    assert max(map(len, parts)) > 10
    assert any(is_in_order(parts, text) for text in raised)


def test_the_page_of_errors_lists_what_is_met_most_often():
    assert len(messages_of(page("errors.md"))) > 40
