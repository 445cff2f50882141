"""What a run finds stays, whatever happens to the processes that measure."""

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from fastrl.bench import child, report, worker
from fastrl.bench import run as runner
from fastrl.bench.cases import SELECTIONS
from fastrl.bench.journal import Journal
from fastrl.bench.run import Run
from fastrl.bench.settings import Settings
from fastrl.bench.timing import LATE, Plan, measure

#: A worker of which job `dies` dies, `hangs` hangs, `loses` loses the GPU, and `slow` hangs in a
#: peer.
WORKER = """
import os, sys, time
from pathlib import Path
from fastrl.bench.journal import Journal

_, settings, out, package, until, *jobs = sys.argv
journal = Journal(Path(out))
case = dict(op="gae", step="forward", model="", shape={"tokens": 1}, dtype="float32", variant="",
            device="cpu", flops=0, bytes_moved=1)
row = dict(name="fastrl cpu", kind="fastrl", seconds={"0": 0.001}, peak=0, error=0.0, host=None,
           kernels=None, failure="")
for job in jobs[:1]:
    if time.monotonic() > float(until):
        sys.exit(0)
    journal.append(job=job, started=time.time())
    if job == "dies":
        os._exit(9)
    if job == "hangs":
        time.sleep(600)
    if job == "loses" and not journal.left_out(job):
        journal.append(job=job, lost="a peer", why="illegal address")
        sys.exit(1)
    if job == "slow" and not journal.left_out(job):
        journal.append(job=job, trying="fastrl cpu")
        late = dict(row, name="a slow peer", kind="peer", seconds={})
        journal.append(job=job, partial=dict(case, name=job, providers=[row, late]))
        journal.append(job=job, trying="a slow peer")
        time.sleep(600)
    if job == "ceilings":
        journal.append(job=job, result={"copy GB/s": 1.0})
        continue
    left_out = [dict(row, name=name, kind="peer", failure=why, seconds={})
                for name, why in journal.left_out(job).items()]
    journal.append(job=job, result=dict(case, name=job, providers=[row, *left_out]))
"""
NAMES = ("good", "dies", "hangs", "loses", "slow")


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """A function that makes a run whose worker is the pretended one."""
    (tmp_path / "worker.py").write_text(WORKER)
    script = str(tmp_path / "worker.py")
    command = lambda module, *arguments: [sys.executable, script, *arguments]  # noqa: E731
    monkeypatch.setattr(runner.child, "command", command)
    monkeypatch.setattr(runner, "STARTING", 30.0)
    monkeypatch.setattr(runner, "machine", lambda device: {"device": "pretended"})
    monkeypatch.setattr(runner, "in_words", lambda *run: "four cases")
    cases = [SimpleNamespace(name=name) for name in NAMES]

    def make(plan=Plan(), **limits):  # noqa: B008
        settings = SimpleNamespace(
            cases=lambda: cases, to_json=lambda: "{}", device="cpu", tiny=False, plan=plan
        )
        return Run(settings, tmp_path, "fastrl bench", **{"seconds": 60.0, "silent": 1.0, **limits})

    return make


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_costs_one_case(make_run, tmp_path, capsys):
    found = make_run().main()
    died = dict.fromkeys(("dies", "hangs"), runner.DIED)
    assert found["not_run"] == died
    assert not found["complete"]
    assert json.loads((tmp_path / "results.json").read_text()) == found
    text = (tmp_path / "results.md").read_text()
    assert "| a peer | illegal address |" in text
    assert f"| a slow peer | {runner.DIED} |" in text
    assert text.count("| fastrl cpu | 1 (1 round) | 1.00 |") == 3
    assert capsys.readouterr().out.count("## ") == 3


@pytest.mark.slow
def test_resuming_leaves_out_what_has_a_result(make_run):
    make_run().main()
    kept = make_run().journal.results()
    assert make_run().main(resume=True)["not_run"].keys() == {"dies", "hangs"}
    assert make_run().journal.results() == kept


@pytest.mark.slow
def test_resuming_another_run_is_refused(make_run, tmp_path, monkeypatch):
    make_run().main()
    kept = make_run().journal.path.read_text()
    monkeypatch.setattr(runner, "machine", lambda device: {"device": "another"})
    with pytest.raises(ValueError, match="was measured with machine 'pretended', and this run has"):
        make_run().main(resume=True)
    assert make_run().journal.path.read_text() == kept


def test_a_folder_keeps_what_other_runs_have_measured(make_run, tmp_path):
    case = {"name": "earlier", "dtype": "float32", "flops": 0, "bytes_moved": 1, "providers": []}
    make_run().journal.append(job="earlier", result=case)
    assert make_run(seconds=0.0).main(resume=True)["cases"] == [case]
    assert make_run(seconds=0.0).main()["cases"] == []
    kept = json.loads((tmp_path / "results.json.before").read_text())
    assert kept["cases"] == [case]


def test_what_a_case_held_is_freed_before_the_next(tmp_path, monkeypatch):
    sizes = tuple(size for size in SELECTIONS["smoke"] if size.op == "token_logprobs")
    one = Settings(sizes, ("forward", "both"), "cpu", Plan(1, 1, 1, 0.1), ("cpu",), (), tiny=True)
    held = []

    def watched(case, *options, **limits):
        assert all(tensor() is None for tensor in held)
        made = case._replace(inputs=lambda seed: watch(case.inputs(seed)))
        found = measure(made, *options, **limits)
        held.append(weakref.ref(case.providers[-1].forward.held["logits"]))
        return found

    def watch(inputs):
        held.extend(weakref.ref(x) for x in inputs.values() if torch.is_tensor(x))
        return inputs

    monkeypatch.setattr(worker, "measure", watched)
    names = [case.name for case in one.cases()]
    arguments = [one.to_json(), str(tmp_path), child.PACKAGE, "inf"]
    assert worker.main([*arguments, *names]) == 0
    found = Journal(tmp_path).results()
    assert [found[name].get("failure") for name in names] == [None, None]
    assert len(held) > 4


@pytest.mark.slow
def test_a_hurried_run_goes_on_with_what_a_slow_case_has_timed(make_run, capsys):
    run = make_run(Plan(hurried=True), silent=5.0)
    found = run.main()
    assert found["not_run"] == {"dies": runner.DIED, "hangs": LATE}
    assert report.late(found) == ["hangs", "slow: a slow peer"]
    assert [case["name"] for case in found["cases"]] == ["good", "loses", "slow"]
    said = capsys.readouterr()
    assert said.out.count("## ") == 3
    assert said.err.startswith("four cases\n")
    # more time measures these again, and nothing else
    assert {"hangs", "slow"} == {*NAMES, "ceilings"} - {*make_run().journal.results()}


def test_out_of_time_nothing_is_left_out_in_silence(make_run):
    found = make_run(seconds=0.0).main()
    assert found["not_run"] == dict.fromkeys(NAMES, LATE)


def test_a_worker_imports_the_package_of_its_parent(tmp_path, monkeypatch):
    (tmp_path / "fastrl").mkdir()
    (tmp_path / "fastrl" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)
    one = Settings((), (), "cpu", Plan(), tiny=True)
    arguments = (one.to_json(), str(tmp_path), child.PACKAGE, "inf")
    done = subprocess.run(child.command(runner.WORKER, *arguments), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(SystemExit, match="the run is one of /elsewhere/fastrl, and this process"):
        worker.main([one.to_json(), str(tmp_path), "/elsewhere/fastrl", "inf"])


def test_a_worker_that_does_not_start_says_why(make_run, tmp_path):
    (tmp_path / "worker.py").write_text("raise SystemExit('there is no torch')")
    with pytest.raises(RuntimeError, match="there is no torch"):
        make_run().main()


def test_a_cut_line_of_the_journal_is_left_out(tmp_path):
    journal = Journal(tmp_path)
    journal.append(job="a", result=1)
    with journal.path.open("a") as file:
        file.write('{"job": "b", "resu')
    journal.append(job="c", failure="none")
    assert [one["job"] for one in journal.entries()] == ["a", "c"]


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    """The real command on tiny shapes, interrupted after its first case."""
    command = [sys.executable, "-m", "fastrl.bench", "--smoke", "--peer", "none"]
    running = subprocess.Popen(
        [*command, "--out", str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "results.json").exists():
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["cases"]
    if running.returncode == 130:  # else all had been measured before the signal came
        assert set(found["not_run"].values()) == {LATE}
