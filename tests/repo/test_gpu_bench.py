"""One run of each program that measures on a GPU, on a CPU; the constants that they know."""

import ast
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"


def test_a_killed_run_keeps_its_cases(tmp_path):
    command = [sys.executable, str(BENCH / "gpu.py"), "--smoke", "--out", str(tmp_path)]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    table = tmp_path / "bench.md"
    # three cases, predictions and targets
    while not table.exists() or table.read_text().count("\n### ") < 5:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=60)
    lines = (tmp_path / "bench.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    cases = [one["result"] for one in entries if one.get("job", "").isdigit() and "result" in one]
    assert len(cases) >= 3
    for case in cases:
        ran = [one for one in case["providers"] if one["kind"].startswith("fastrl")]
        assert ran
        assert all(one["samples"] and one["error"] < 0.05 for one in ran)


def test_values_are_tried_on_a_cpu(tmp_path):
    command = [sys.executable, str(BENCH / "gpu_tuning.py"), "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--seconds", "240"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "tuning.jsonl").read_text().splitlines()]
    assert [(row["value"], row["default"]) for row in rows] == [(512, False), (192 * 2**20, True)]
    assert all(row["milliseconds"] > 0 and row["floor"] > 0 for row in rows)


def test_predictions_are_of_the_constants_that_kernels_are_launched_with(bench):
    pytest.importorskip("triton")
    from fastrl.triton.gae import gae
    from fastrl.triton.vocabulary import rows

    predictions = bench("gpu_predictions")
    assert (predictions.RESIDENT, predictions.GAE_CHUNK) == (rows.RESIDENT, gae.BLOCK)


def test_a_constant_is_tuned_wherever_it_is_held(bench):
    pytest.importorskip("triton")
    imports = [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), node)
        for path in (ROOT / "fastrl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    for name, knob in bench("gpu_tuning").KNOBS.items():
        copies = {
            module
            for module, node in imports
            if node.module in knob.modules and knob.name in [alias.name for alias in node.names]
        }
        assert copies <= set(knob.modules), name
