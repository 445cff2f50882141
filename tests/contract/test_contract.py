"""The contract in Python and in C++: the same kinds, fields and argument names, in one order."""

import re
from pathlib import Path

import pytest
import torch

from fastrl import contract, library

ROOT = Path(__file__).parents[2]
HEADER = (ROOT / "csrc" / "contract.h").read_text()
ARGUMENTS = "".join((ROOT / "csrc" / name).read_text() for name in ("arguments.h", "check_gae.h"))
#: The struct that has the fields of a tuple, and where it is.
STRUCTS = {
    "Coefficients": (contract.Coefficients, HEADER),
    "Objective": (contract.ObjectiveArguments, HEADER),
    "Metrics": (contract.Metrics, HEADER),
    "RowStatsOf": (contract.RowStats, HEADER),
    "RowArguments": (contract.RowArguments, ARGUMENTS),
    "ScalingArguments": (contract.ScalingArguments, ARGUMENTS),
    "SavedStats": (contract.SavedStats, ARGUMENTS),
    "LossArguments": (contract.LossArguments, ARGUMENTS),
    "ObjectiveArguments": (contract.ObjectiveArguments, ARGUMENTS),
    "AggregationArguments": (contract.AggregationArguments, ARGUMENTS),
}
#: The structs that operators take, each by its fields.
TAKEN = re.findall(r"^struct (\w+) {(?=[^}]*auto fields)", ARGUMENTS, re.MULTILINE)
OPERATOR_SOURCES = sorted(
    path
    for folder in ("cpu", "cuda")
    for path in (ROOT / "csrc" / folder).rglob("*.cpp")
    if "m.impl(" in path.read_text()
)


def body_of(struct, text):
    found = re.search(rf"struct {struct} {{(.*?)^}};", text, re.DOTALL | re.MULTILINE)
    assert found, f"csrc has no struct {struct}"
    return re.sub(r"//[^\n]*", "", found[1])


def fields_of(struct, text):
    """The names of the data members of a struct, in order."""
    body = re.sub(r"(FASTRL_HD|auto) .*?{.*?}", "", body_of(struct, text), flags=re.DOTALL)
    declarations = (line.strip() for line in body.split(";"))
    names = []
    for declaration in filter(None, declarations):
        first, *others = (part.strip() for part in declaration.split(","))
        names += [re.split(r"[\s&*>]+", part)[-1] for part in (first, *others)]
    return names


def enumerators_of(enum):
    found = re.search(rf"enum class {enum} : int {{(.*?)}};", HEADER, re.DOTALL)
    assert found, f"csrc/contract.h has no enum {enum}"
    return re.findall(r"\w+", found[1])


def as_enumerator(value):
    words = re.split(r"[-_]", value)
    return "k" + "".join(word[0].upper() + word[1:] for word in words)


def assert_same(ours, theirs, where):
    only_python = [name for name in ours if name not in theirs]
    only_cpp = [name for name in theirs if name not in ours]
    assert not only_python, f"{where}: {', '.join(only_python)} in fastrl/contract.py alone"
    assert not only_cpp, f"{where}: {', '.join(only_cpp)} in C++ alone"
    assert list(ours) == list(theirs), f"{where}: the order differs"


@pytest.mark.parametrize("name", contract.KINDS)
def test_kinds_are_the_enumerators(name):
    expected = [as_enumerator(value) for value in contract.KINDS[name]]
    assert_same(expected, enumerators_of(name), f"enum {name}")
    last = f"kLast<{name}> = {name}::{expected[-1]};"
    assert last in HEADER, f"csrc/contract.h lacks {last}"


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_are_those_of_the_struct(name):
    ours, text = STRUCTS[name]
    assert_same(ours._fields, fields_of(name, text), f"struct {name}")


@pytest.mark.parametrize("struct", TAKEN)
def test_arguments_are_taken_in_the_order_of_the_fields(struct):
    taken = re.search(r"std::tie\((.*?)\)", body_of(struct, ARGUMENTS), re.DOTALL)[1]
    assert_same(fields_of(struct, ARGUMENTS), re.findall(r"\w+", taken), f"fields of {struct}")


def test_statistics_are_visited_in_the_order_of_the_fields():
    visited = re.findall(r"f\(stats\.(\w+)\.\.\.\)", HEADER)
    assert_same(contract.RowStats._fields, visited, "for_each_stat")


def parameters(source, operator):
    """The arguments that the C++ function of an operator takes, of a struct those in its fields.

    Those of a struct named ``teacher_...`` have this prefix, too.
    """
    found = re.search(rf"\b{operator}\(([^;{{]*?)\)\s*{{", source.read_text(), re.DOTALL)
    assert found, f"{source.relative_to(ROOT)} has no function {operator}"
    if not found[1].strip():
        return []
    flat = re.sub(r"<[^<>]*>", "", found[1])
    names = []
    for part in flat.split(","):
        *_, kind, name = re.split(r"[\s&*]+", part.strip())
        prefix = "teacher_" * name.startswith("teacher_")
        fields = (
            [f"{prefix}{field}" for field in fields_of(kind, ARGUMENTS)] if kind in TAKEN else []
        )
        names += fields or [name]
    return names


def implementations():
    for source in OPERATOR_SOURCES:
        for operator in re.findall(r'm\.impl\("(\w+)"', source.read_text()):
            yield pytest.param(source, operator, id=f"{source.parts[-3]}-{operator}")


@pytest.mark.parametrize(("source", "operator"), list(implementations()))
def test_cpp_functions_take_the_arguments_of_the_schema(source, operator):
    schema = torch._C.parse_schema(operator + library._SCHEMAS[operator])
    expected = [argument.name for argument in schema.arguments]
    theirs = parameters(source, operator)
    assert_same(expected, theirs, f"{source.relative_to(ROOT)}: {operator}")


def test_every_operator_of_the_kernels_was_compared():
    found = {parameter.values[1] for parameter in implementations()}
    assert found >= set(library.OPERATORS)
