"""The programs that measure on a GPU, on a CPU: what is found stays, whatever a process does."""

import argparse
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
#: A worker of which job 1 dies, job 2 hangs, job 3 loses the GPU and job 4 hangs in a peer.
WORKER = """
import os, sys, time
sys.path[:0] = [{bench!r}]
from pathlib import Path
from gpu_journal import Journal

out, jobs = Path(sys.argv[sys.argv.index("--out") + 1]), sys.argv[sys.argv.index("--until") + 2:]
journal = Journal(out)
case = dict(label="a case", work="work", op="gae", shape="1 x 1", dtype="float32", flops=0,
            bytes_moved=1, small=True, graphs=["good", "refused", "after"])
row = dict(provider="good", kind="fastrl cpu", samples=[1.0], host=None, peak=0, error=0.0,
           failure="")
for job in jobs:
    journal.append(job=job, started=time.time())
    if job == "1":
        os._exit(9)
    if job == "2":
        time.sleep(600)
    if job == "3" and not journal.left_out(job):
        journal.append(job=job, lost="a peer", why="illegal address")
        sys.exit(1)
    if job == "4" and not journal.left_out(job):
        journal.append(job=job, trying="good")
        journal.append(job=job, trying="a slow peer")
        time.sleep(600)
    if "refused" in job:
        journal.append(job=job, failure="cannot be captured")
        sys.exit(1)
    if job.startswith("graph"):
        journal.append(job=job, result=dict(milliseconds=0.002))
    elif job.isdigit():
        left_out = [dict(row, provider=p, kind="peer", failure=w, samples=[]) for p, w in
                    journal.left_out(job).items()]
        journal.append(job=job, result=dict(case, providers=[row, *left_out]))
    else:
        journal.append(job=job, result=dict(rate=1.0))
"""


class FakeItem:
    label, work = "a case", "work"

    def make(self):
        return self


@pytest.fixture
def run(bench, tmp_path, monkeypatch):
    """A run whose processes are the pretended ones above."""
    gpu = bench("gpu")
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(bench=str(BENCH)))
    monkeypatch.setattr(gpu, "WORKER", worker)
    monkeypatch.setattr(gpu, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(gpu, "items", lambda *_: [FakeItem()] * 5)
    options = argparse.Namespace(smoke=True, seconds=60.0, only="", peers=True, resume=False)
    return gpu.Run(options, tmp_path)


def test_a_process_that_dies_or_hangs_costs_one_case(run, tmp_path):
    assert run.main() == 1
    kinds = {job: "result" in one for job, one in run.journal.results().items()}
    order = ("good", "refused", "after")
    graphs = {f"graph {n} {name}": name != "refused" for n in "034" for name in order}
    cases = {"0": True, "1": False, "2": False, "3": True, "4": True}
    assert kinds == {"anchors": True, "lengths": True, **cases, **graphs}
    text = (tmp_path / "bench.md").read_text()
    assert text.count("its process died or hung") == 2
    assert "| a peer | illegal address |" in text
    assert "| a slow peer | its process died, hung, or compiled for too long |" in text
    assert text.count("| good | 1 (1-1) |") == 3


def test_out_of_time_nothing_is_left_out_in_silence(run, tmp_path):
    run.last_case = 0.0
    assert run.main() == 1
    assert (tmp_path / "bench.md").read_text().count("not run, out of time: a case, work") == 5


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
    tuning = bench("gpu_tuning")
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
