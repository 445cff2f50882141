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

import fastrl
from fastrl.bench import child, report, worker
from fastrl.bench import run as runner
from fastrl.bench.cases import SELECTIONS
from fastrl.bench.child import say
from fastrl.bench.run import Run
from fastrl.bench.timing import LATE, Plan, measure
from fastrl.bench.worker import Settings

NAMES = ("good", "dies", "hangs", "loses", "slow")
CASE = {"op": "gae", "step": "forward", "model": "", "shape": {"tokens": 1}, "dtype": "float32"}
CASE |= {"variant": "", "device": "cpu", "flops": 0, "bytes_moved": 1}
ROW = {"name": "fastrl cpu", "kind": "fastrl", "seconds": {"0": 0.001}, "peak": 0, "error": 0.0}
ROW |= {"host": None, "kernels": None, "failure": ""}


class Pretended(Settings):
    """Settings of cases that have a name alone."""

    def cases(self):
        return [SimpleNamespace(name=name) for name in NAMES]


def work(settings, end, jobs, lost):
    """Make one job: `dies` dies, `hangs` hangs, `loses` loses the GPU, `slow` hangs in a peer."""
    job = jobs[0]
    if time.monotonic() > end:
        return
    say(job=job)
    if job == "dies":
        os._exit(9)
    if job == "hangs":
        time.sleep(600)
    if job == "loses" and job not in lost:
        say(job=job, lost="a peer", why="illegal address")
        sys.exit(1)
    if job == "slow" and job not in lost:
        say(job=job, trying="fastrl cpu")
        late = ROW | {"name": "a slow peer", "kind": "peer", "seconds": {}}
        say(job=job, partial=CASE | {"name": job, "providers": [ROW, late]})
        say(job=job, trying="a slow peer")
        time.sleep(600)
    if job == "ceilings":
        say(job=job, result={"copy GB/s": 1.0})
        return
    left_out = [
        ROW | {"name": name, "kind": "peer", "failure": why, "seconds": {}}
        for name, why in lost.get(job, {}).items()
    ]
    say(job=job, result=CASE | {"name": job, "providers": [ROW, *left_out]})


def work_without_torch(*arguments):
    raise SystemExit("there is no torch")


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """A function that makes a run whose worker is the pretended one."""
    monkeypatch.setattr(runner, "work", work)
    monkeypatch.setattr(runner, "machine", lambda device: {"device": "pretended"})
    monkeypatch.setattr(runner, "in_words", lambda *run: "four cases")

    def make(plan=Plan(), **limits):  # noqa: B008
        settings = Pretended((), (), "cpu", plan)
        return Run(
            settings, tmp_path, "fastrl bench", **{"seconds": 180.0, "silent": 1.0, **limits}
        )

    return make


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_costs_one_case(make_run, tmp_path, capsys, monkeypatch):
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

    # resuming measures nothing that has a result, and refuses what another machine has measured
    monkeypatch.setattr(runner, "work", work_without_torch)
    again = make_run().main(resume=True)
    assert {**again, "date": 0} == {**found, "date": 0}
    monkeypatch.setattr(runner, "machine", lambda device: {"device": "another"})
    with pytest.raises(ValueError, match="was measured with machine 'pretended', and this run has"):
        make_run().main(resume=True)
    assert json.loads((tmp_path / "results.json").read_text()) == again


@pytest.mark.slow
def test_a_hurried_run_goes_on_with_what_a_slow_case_has_timed(make_run, capsys):
    found = make_run(Plan(hurried=True), silent=5.0).main()
    assert found["not_run"] == {"dies": runner.DIED, "hangs": LATE}
    assert report.late(found) == ["hangs", "slow: a slow peer"]
    assert [case["name"] for case in found["cases"]] == ["good", "loses", "slow"]
    said = capsys.readouterr()
    assert said.out.count("## ") == 3
    assert said.err.startswith("four cases\n")
    # more time measures these again, and nothing else
    again = make_run(Plan(hurried=True), seconds=0.0)
    again.main(resume=True)
    assert again.results()["cases"] == [*found["cases"]]
    assert {"hangs", "slow"} == {*NAMES} - again.found.keys() - again.failed.keys()


def test_a_folder_keeps_what_other_runs_have_measured(make_run, tmp_path):
    earlier = make_run(seconds=0.0)
    earlier.found["earlier"] = case = CASE | {"name": "earlier", "providers": [ROW]}
    assert earlier.main()["not_run"] == dict.fromkeys(NAMES, LATE)
    assert make_run(seconds=0.0).main(resume=True)["cases"] == [case]
    assert make_run(seconds=0.0).main()["cases"] == []
    kept = json.loads((tmp_path / "results.json.before").read_text())
    assert kept["cases"] == [case]


@pytest.mark.parametrize("text", ["", "{}", "[]"])
def test_a_damaged_folder_is_refused(text, make_run, tmp_path):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=r"--resume: .*results.json is damaged or of another"):
        make_run().main(resume=True)
    assert (tmp_path / "results.json").read_text() == text


def test_what_a_case_held_is_freed_before_the_next(monkeypatch):
    sizes = tuple(size for size in SELECTIONS["smoke"] if size.op == "token_logprobs")
    one = Settings(sizes, ("forward", "both"), "cpu", Plan(1, 1, 1, 0.1), ("cpu",), (), tiny=True)
    held, said = [], []

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
    monkeypatch.setattr(worker, "say", lambda **entry: said.append(entry))
    worker.work(one, float("inf"), [case.name for case in one.cases()], {})
    assert sum("result" in entry for entry in said) == 2
    assert not any("failure" in entry for entry in said)
    assert len(held) > 4


def test_a_worker_imports_the_package_of_its_parent(tmp_path, monkeypatch):
    (tmp_path / "fastrl").mkdir()
    (tmp_path / "fastrl" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)
    with child.Process(where_it_is, tmp_path / "log") as process:
        assert process.heard() == {"package": fastrl.__file__}
        assert process.heard() is None
        assert process.status == 0


def where_it_is():
    say(package=fastrl.__file__)


def test_a_worker_that_does_not_start_says_why(make_run, monkeypatch):
    monkeypatch.setattr(runner, "work", work_without_torch)
    with pytest.raises(RuntimeError, match="there is no torch"):
        make_run().main()


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
