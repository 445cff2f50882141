"""The list of `make mutants` fits the sources, so it cannot rot."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.faults import ROOT, faults

FAULTS = faults()
FOLDERS = ("ops", "reference", "integrations", "train", "triton")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.path}: {fault.old[:40]}")
def test_a_fault_applies_and_has_tests(fault):
    changed = fault.applied((ROOT / fault.path).read_text())
    assert fault.new != fault.old
    if fault.path.endswith(".py"):
        ast.parse(changed)
    files = [test.partition("::")[0] for test in fault.tests if ".py" in test]
    assert files
    assert all((ROOT / test).exists() for test in files)


def test_the_list_is_spread_over_the_sources():
    counts = Counter(fault.path for fault in FAULTS)
    assert sum(counts.values()) >= 100
    assert max(counts.values()) <= 10
    folders = {Path(path).parts[:2] for path in counts}
    assert folders >= {("fastrl", name) for name in FOLDERS} | {("csrc", "cpu"), ("csrc", "cuda")}
