"""What prepares measurements on a GPU and judges them, on a CPU."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench" / "gpu_cost"


@pytest.mark.slow
def test_values_are_tried_on_a_cpu(tmp_path):
    command = [sys.executable, str(BENCH / "tuning.py"), "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--seconds", "240"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "tuning.jsonl").read_text().splitlines()]
    tried = [(row["value"], row["default"]) for row in rows]
    assert tried == 2 * [(512, False)] + 2 * [(192 * 2**20, True)]
    assert all(row["seconds"] > 0 and row["floor"] > 0 for row in rows)


def test_predictions_are_of_the_constants_that_kernels_are_launched_with(bench):
    pytest.importorskip("triton")
    from fastrl.triton.gae import gae
    from fastrl.triton.vocabulary import rows

    predictions = bench("predictions")
    assert (predictions.RESIDENT, predictions.GAE_CHUNK) == (rows.RESIDENT, gae.BLOCK)


def test_a_constant_is_tuned_wherever_it_is_held(bench):
    pytest.importorskip("triton")
    imports = [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), node)
        for path in (ROOT / "fastrl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    tuning = bench("tuning")
    for name, knob in tuning.KNOBS.items():
        default = tuning.set_constant(knob, 7)
        held = [getattr(sys.modules[module], knob.name) for module in knob.modules]
        tuning.set_constant(knob, default)
        assert default in knob.values, name
        assert [getattr(one, "value", one) for one in held] == [7] * len(held), name
        copies = {
            module
            for module, node in imports
            if node.module in knob.modules and knob.name in [alias.name for alias in node.names]
        }
        assert copies <= set(knob.modules), name


def row(name, kind, *seconds):
    times = {str(turn): time for turn, time in enumerate(seconds)}
    return {"name": name, "kind": kind, "seconds": times, "kernels": None, "failure": ""}


def case(name, **fields):
    op, step, *_ = name.split(", ")
    rows = [row("fastrl triton", "fastrl", 2.0, 3.0), row("TRL", "peer", 3.0, 6.0)]
    rows += [row("liger", "peer", 9.0, 9.0), row("bare GEMMs", "floor", 2.0, 2.0)]
    return {"name": name, "op": op, "step": step, "device": "cuda", "providers": rows, **fields}


def test_goals_take_the_fastest_of_a_kind_and_pair_rounds(bench):
    found = {
        "cases": [case("linear_policy_loss, both, llama-3.1-8b, 8192 x 4096 x 128256, bfloat16")]
    }
    lines = bench("goals").table(found)
    (met,) = [line for line in lines if "| TRL |" in line]
    assert "| 1.75 | at least 1 times as fast | met |" in met
    (missed,) = [line for line in lines if "| bare GEMMs |" in line]
    assert "| 1.25 | at most 1.15 times its time | MISSED |" in missed
    assert sum("not measured" in line for line in lines) == 3


def test_predictions_stand_beside_what_was_measured(bench):
    predictions = bench("predictions")
    shape = {"rows": 8192, "vocabulary": 151936}
    fields = {"shape": shape, "dtype": "bfloat16", "variant": "", "bytes_moved": 2 * 8192 * 151936}
    one = case("token_stats, forward, qwen3-0.6b, 8192 x 151936, bfloat16", **fields)
    lines = predictions.table({"cases": [one], "ceilings": predictions.MACHINE})
    assert len(lines) == 3  # a head of two lines, and the one provider that has a prediction
    assert "| 829.8 us | 2500.000 ms | 3012.87 | apart |" in lines[-1]
