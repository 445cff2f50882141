"""The docstrings of public names: complete, in agreement with the code, and parsed as written.

griffe reads them, as it does for the API reference. Public are the names in `fastrl.__all__`, and
those of the drop-ins and training loops that documents name.
"""

import doctest
import logging
import re
from pathlib import Path

import griffe
import pytest

import fastrl

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IMPORT = re.compile(r"from (fastrl\.(?:train|integrations)[\w.]*) import (\([^)]*\)|[^\n(]*)")
DOTTED = re.compile(r"\bfastrl\.(?:train|integrations)(?:\.\w+)+")

ELSEWHERE = re.compile(r".*\bas in `\w+`", re.DOTALL)
SHAPE = re.compile(r"`\[|shape|scalar|0-d|one\s+element")
SOURCE = re.compile(r"arXiv \d{4}\.\d{5}|https?://|\b(19|20)\d\d\b|\b(TRL|verl)\b")

#: Arguments that mean the same in all functions.
SAME = (
    "token_ids temperature logit_scale logit_softcap ignore_index inplace_backward kept "
    "vocab_group bias lora chunk_tokens compact reduce_hidden_gradient advantages old_logprobs "
    "rollout_logprobs policy_weights normalizer cu_seqlens aggregation count_empty length_norm "
    "bootstrap_values"
)

PACKAGE = griffe.load("fastrl", search_paths=[ROOT], docstring_parser="google")


def named_in_documents():
    for text in (path.read_text() for path in DOCUMENTS):
        yield from DOTTED.findall(text)
        for module, names in IMPORT.findall(text):
            alone = re.sub(r"#.*| as \w+", "", names)
            yield from (f"{module}.{name}" for name in re.findall(r"\w+", alone))


def definition(name):
    """The object that a name means, through the modules that import it; None if there is none."""
    try:
        found = PACKAGE[name.removeprefix("fastrl.")]
    except KeyError:
        return None
    return found.final_target if found.is_alias else found


def public_names():
    """Functions and classes by path, and the public methods of classes in `fastrl.__all__`."""
    found = {}
    for name in {*(f"fastrl.{one}" for one in fastrl.__all__), *named_in_documents()}:
        item = definition(name)
        if item and (item.is_function or item.is_class):
            found[item.path] = item
        if item and item.is_class and name.removeprefix("fastrl.") in fastrl.__all__:
            methods = (one for one in item.members.values() if one.is_function)
            found |= {one.path: one for one in methods if not one.name.startswith("_")}
    return dict(sorted(found.items()))


PUBLIC = public_names()
FUNCTIONS = {path: item for path, item in PUBLIC.items() if item.is_function}
RESULTS = {str(item.returns).split(".")[-1] for item in FUNCTIONS.values()}


def sections(item, kind):
    parsed = item.docstring.parsed if item.docstring else []
    return [section.value for section in parsed if section.kind.value == kind]


def described(item):
    """Parameters or fields and their descriptions, as the docstring lists them."""
    listed = sections(item, "parameters") + sections(item, "attributes")
    return {one.name.strip("*"): one.description for section in listed for one in section}


def declared(item):
    """Parameters or fields and their annotations, as the code lists them."""
    if item.is_class and ("__init__" not in item.members or sections(item, "attributes")):
        fields = (one for one in item.attributes.values() if not one.name.startswith("_"))
        return {one.name: str(one.annotation) for one in fields if "property" not in one.labels}
    function = item if item.is_function else item.members["__init__"]
    return {
        one.name: str(one.annotation)
        for one in function.parameters
        if one.name not in ("self", "cls")
    }


def test_documents_name_what_exists():
    assert sorted(name for name in named_in_documents() if definition(name) is None) == []


def missing(item):
    """Yield what the docstring of a public name lacks."""
    text, annotations, listed = item.docstring.value, declared(item), described(item)
    settings = item.is_class and all(one.docstring for one in item.attributes.values())
    if not settings and list(listed) != list(annotations):  # settings have a docstring below each
        yield f"the arguments or fields of the code: {list(annotations)}"
    shapes = " ".join(sections(item, "text")) if item.is_class else ""
    for name, description in listed.items():
        if "Tensor" in annotations.get(name, "") and not SHAPE.search(f"{shapes} {description}"):
            yield f"the shape of {name}"
    if item.is_function and str(item.returns) != "None" and not sections(item, "returns"):
        yield "Returns"
    tensors = [name for name, annotation in annotations.items() if "Tensor" in annotation]
    refuses = item.is_function and tensors and not item.parent.is_class
    if refuses and not sections(item, "raises"):
        yield "Raises"
    if not doctest.DocTestParser().get_examples(text):
        yield "an example"
    if any(re.search(r"log_?prob|entropy|diverg", name) for name in listed) and "nats" not in text:
        yield "that log-probabilities are in nats"
    of_math = item.path.startswith(("fastrl.ops.", "fastrl.objective."))
    of_math = of_math and item.name not in {*RESULTS, "reduce_metrics"} and not item.parent.is_class
    if of_math and not SOURCE.search(text):
        yield "the source of its mathematics"


@pytest.mark.parametrize("item", PUBLIC.values(), ids=PUBLIC)
def test_a_docstring_is_complete(item):
    assert list(missing(item)) == []


def test_an_argument_is_described_where_it_is_used():
    """In public and in other functions: an editor does not follow "as in `x`"."""
    deferred = []

    def visit(item):
        if not item.is_module:
            found = described(item).items()
            deferred.extend(f"{item.path}: {name}" for name, text in found if ELSEWHERE.match(text))
        for member in item.members.values():
            if not (member.is_alias or member.is_attribute):
                visit(member)

    visit(PACKAGE)
    assert deferred == []


@pytest.mark.parametrize("name", SAME.split())
def test_an_argument_is_described_in_the_same_words_everywhere(name):
    """The first sentence is the same; what a function adds to it comes after."""
    functions = [
        item
        for item in FUNCTIONS.values()
        if item.path.startswith("fastrl.ops.") and not item.parent.is_class
    ]
    texts = [described(one)[name] for one in functions if name in described(one)]
    sentences = {" ".join(text.split()).partition(". ")[0].removesuffix(".") for text in texts}
    assert len(texts) > 1
    assert len(sentences) == 1


def test_every_docstring_is_parsed_as_written(caplog):
    """No section with a wrong name, indentation or argument; no heading that is none."""
    caplog.set_level(logging.WARNING, logger="griffe")
    headings = []

    def visit(item):
        parsed = item.docstring.parsed if item.docstring else []
        admonitions = (section for section in parsed if section.kind.value == "admonition")
        headings.extend(f"{item.path}: {section.title}" for section in admonitions)
        for member in item.members.values():
            if not member.is_alias:
                visit(member)

    visit(PACKAGE)
    assert headings == []
    assert [one.getMessage() for one in caplog.records if "No type" not in one.getMessage()] == []
