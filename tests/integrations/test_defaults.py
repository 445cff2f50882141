"""The defaults of TRL, verl, OpenRLHF and Liger beside those of conventions and drop-ins.

Theirs and the names of all options are compared with the source of the package, which need not be
importable. The tables are of one version: with an older one, the reason of a skip says what it
changes; a newer one that changes something fails. What differs from ours is in docs/conventions.md.
"""

import ast
import importlib.metadata
import importlib.util
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.integrations.trainer_defaults import SOURCES

ROWS = [(source, row) for source in SOURCES for row in source.rows if row.ours]
TRAINERS = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF", "liger_kernel": "Liger"}


def value_of(node):
    """Return a literal, or the source of anything else, without `field(default=...)`."""
    if isinstance(node, ast.Call):
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        node = named.get("default", node)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def options_of(tree, name):
    """Return the options of a function or class of this name or of a parser, with defaults.

    A field need not have one; a parameter without one is no option.
    """
    if not name:
        options = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and x.args]
        options = [x for x in options if getattr(x.func, "attr", "") == "add_argument"]
        names = [ast.unparse(x.args[0]).lstrip("f").strip("'").lstrip("-") for x in options]
        return dict(zip(names, map(value_of, options), strict=True))
    found = next((x for x in ast.walk(tree) if getattr(x, "name", None) == name), None)
    if found is None:
        return {}
    if isinstance(found, ast.ClassDef):
        inits = [x for x in found.body if getattr(x, "name", None) == "__init__"]
        if not inits:
            fields = [x for x in found.body if isinstance(x, ast.AnnAssign)]
            return {ast.unparse(x.target): x.value and value_of(x.value) for x in fields}
        found = inits[0]
    given = found.args
    names = given.args[len(given.args) - len(given.defaults) :] + given.kwonlyargs
    values = zip(names, given.defaults + given.kw_defaults, strict=True)
    return {x.arg: value_of(value) for x, value in values if value}


def numbers(version):
    """Return a version without what follows its numbers."""
    return [int(part) for part in re.match(r"[\d.]+", version)[0].strip(".").split(".")]


def differences(source, found):
    """Say what these options have that the table has not, and the reverse."""
    compared = {row.option: row.default for row in source.rows}
    known = [*compared, *source.others.split()]
    return {
        "new": [x for x in found if not any(fnmatchcase(x, pattern) for pattern in known)],
        "gone": [pattern for pattern in known if not any(fnmatchcase(x, pattern) for x in found)],
        "changed": {x: found[x] for x in compared if x in found and found[x] != compared[x]},
    }


@pytest.mark.parametrize("source", SOURCES, ids=lambda x: f"{x.package} {x.name or x.file}")
def test_their_options_and_defaults_are_those_of_the_table(source):
    spec = importlib.util.find_spec(source.package)
    if spec is None:
        pytest.skip(f"needs the files of {source.package}")
    installed = importlib.metadata.version(source.package)
    file = Path(spec.submodule_search_locations[0]) / source.file
    tree = ast.parse(file.read_text() if file.exists() else "")
    found = differences(source, options_of(tree, source.name))
    found = {what: names for what, names in found.items() if names}
    if found and numbers(installed) < numbers(source.version):
        pytest.skip(f"{installed} is older than {source.version}, the table's: {found}")
    assert found == {}


@pytest.mark.parametrize(
    ("source", "row"), ROWS, ids=[f"{x.package} {row.option} {row.ours.name}" for x, row in ROWS]
)
def test_our_default_is_theirs_or_the_one_that_the_row_states(source, row):
    ours, theirs = row.ours.read(), row.default if row.meaning is ... else row.meaning
    if row.differs is ...:
        assert ours == theirs
    else:
        assert ours == row.differs
        assert ours != theirs, "it no longer differs"


def test_the_document_names_what_differs_and_nothing_else():
    """An option with the presets where it differs, after the name of its trainer."""
    text = (Path(__file__).parents[2] / "docs" / "conventions.md").read_text()
    text = text.partition("Remaining differences:")[2].partition("\n## ")[0]
    named = {}
    for difference in text.split("\n- "):
        trainer, spans = None, re.findall(rf"`[^`]+`|{'|'.join(TRAINERS.values())}", difference)
        for span in spans:
            if span in TRAINERS.values():
                trainer = span
            else:
                named.setdefault((trainer, span.strip("`")), set()).update(spans)
    compared, differing = set(), set()
    for source, row in ROWS:
        option = TRAINERS[source.package], row.option.rpartition(".")[2]
        compared.add(option)
        if row.differs is not ...:
            differing.add(option)
            presets = {f"`{name}`" for name in row.ours.presets.split()}
            assert presets <= named.get(option, set()), (option, row.ours.name)
    assert compared & named.keys() == differing
