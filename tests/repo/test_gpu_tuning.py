"""bench/gpu_tuning.py: constants that are set are those that kernels are launched with."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
KNOBS = ("lanes", "columns", "resident", "even", "chunk", "gae", "tokens", "programs", "cpu chunk")


@pytest.fixture
def tuning(bench):
    return bench("gpu_tuning")


def test_every_knob_is_here(tuning):
    assert tuple(tuning.KNOBS) == KNOBS


@pytest.mark.parametrize("name", KNOBS)
def test_a_constant_is_set_wherever_it_is_held(tuning, name):
    knob = tuning.KNOBS[name]
    if any("triton" in module for module in knob.modules):
        pytest.importorskip("triton")
    default = tuning.set_constant(knob, 7)
    try:
        assert default in knob.values
        for module in map(sys.modules.get, knob.modules):
            found = getattr(module, knob.name)
            assert getattr(found, "value", found) == 7
    finally:
        tuning.set_constant(knob, default)


@pytest.mark.parametrize("name", KNOBS)
def test_no_other_module_holds_a_copy(tuning, name):
    knob, holders = tuning.KNOBS[name], []
    for path in (ROOT / "fastrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = isinstance(node, ast.ImportFrom) and node.module in knob.modules
            if imported and knob.name in [alias.name for alias in node.names]:
                holders.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert set(holders) <= set(knob.modules)


@pytest.mark.parametrize("name", KNOBS)
def test_a_knob_has_cases(tuning, name):
    cases = importlib.import_module("gpu_cases")
    knob, on_cpu = tuning.KNOBS[name], name.startswith("cpu")
    shapes = cases.SHAPES["smoke" if on_cpu else "gpu"]
    labels = [
        case.label
        for case in (item.make() for item in cases.items(shapes, torch.device("cpu")))
        if case.work in knob.works
    ]
    for shape in knob.shapes:
        assert any(shape in label for label in labels), shape


def test_lanes_and_places_are_read_at_each_launch(tuning, monkeypatch):
    pytest.importorskip("triton")
    rows = importlib.import_module("fastrl.triton.vocabulary.rows")
    monkeypatch.setattr(rows, "processors", lambda _: 132)
    few = torch.empty(1, 64, 151936, device="meta")
    assert (rows.lanes_of(151936), rows.splits_of(few)) == (512, 4)
    monkeypatch.setattr(rows, "MOST_LANES", 256)
    monkeypatch.setattr(rows, "RESIDENT", 1)
    assert (rows.lanes_of(151936), rows.splits_of(few)) == (256, 2)


def test_values_are_tried_on_a_cpu(tmp_path):
    done = _run(tmp_path, "--seconds", "120")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "tuning.jsonl").read_text().splitlines()]
    assert [(row["value"], row["default"]) for row in rows] == [(512, False), (192 * 2**20, True)]
    assert all(row["milliseconds"] > 0 and row["floor"] > 0 for row in rows)
    assert done.stdout.count("fastest") in (1, 2)  # 2: the times are the same


def test_a_value_without_time_is_told(tmp_path):
    done = _run(tmp_path, "--seconds", "0")
    assert done.returncode == 1
    assert "- cpu chunk 512: no time" in (tmp_path / "tuning.md").read_text()


def test_a_wrong_result_has_no_time(tuning, monkeypatch):
    measured = tuning.Measured("fastrl cpu", "fastrl cpu", [1.0], None, 0, 0.5)
    monkeypatch.setattr(tuning, "measure", lambda *_, **__: [measured])
    rows = list(tuning._rows("cpu chunk", 192 * 2**20, smoke=True))
    assert [row["milliseconds"] for row in rows] == [None]
    assert "| wrong |" in tuning.table(rows)[-1]
    assert "fastest" not in tuning.table(rows)[-1]


def _run(folder, *arguments):
    command = [sys.executable, str(BENCH / "gpu_tuning.py"), "--smoke", "--out", str(folder)]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
