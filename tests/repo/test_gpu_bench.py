"""The processes of bench/gpu.py: what is found stays, whatever happens to one of them."""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"

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


class FakeItem:
    label, work = "a case", "work"

    def make(self):
        return self


def test_a_process_that_dies_or_hangs_costs_one_case(run, tmp_path):
    assert run.main() == 1
    results = run.journal.results()
    kinds = {job: "result" in one for job, one in results.items()}
    graphs = {f"graph {n} {name}": name != "refused" for n in "034" for name in ORDER}
    cases = {"0": True, "1": False, "2": False, "3": True, "4": True}
    assert kinds == {"anchors": True, "lengths": True, **cases, **graphs}
    text = (tmp_path / "bench.md").read_text()
    assert text.count("its process died or hung") == 2
    assert "| a peer | illegal address |" in text
    assert "| a slow peer | its process died, hung, or compiled for too long |" in text
    assert text.count("| good | 1 (1-1) |") == 3
    assert "| 2.0 |" in text


ORDER = ("good", "refused", "after")


def test_out_of_time_nothing_is_left_out_in_silence(run, tmp_path):
    run.last_case = 0.0
    assert run.main() == 1
    assert (tmp_path / "bench.md").read_text().count("not run, out of time: a case, work") == 5


def test_a_run_goes_on_where_it_was_cut(run, monkeypatch, tmp_path):
    made = []

    def make(jobs, until):
        made.append([job for job in jobs if job not in run.journal.results()])
        for job in made[-1]:
            if len(run.journal.results()) < 3:
                case = {"op": "gae", "work": "work", "shape": "1 x 1", "dtype": "float32"}
                case |= {"label": "a case", "flops": 0, "bytes_moved": 1, "small": False}
                case |= {"graphs": [], "providers": []}
                run.journal.append(job=job, result=case if job.isdigit() else {"rate": 1.0})

    monkeypatch.setattr(run, "_make", make)
    assert run.main() == 1
    assert made == [["anchors", *"01234"], [], ["lengths"]]
    assert (tmp_path / "bench.md").read_text().count("not run, out of time") == 3
    run.options.resume, made[:] = True, []
    _give(run, monkeypatch)
    assert run.main() == 0
    assert list(run.journal.results()) == ["anchors", *"01234", "lengths"]
    assert "not run, out of time" not in (tmp_path / "bench.md").read_text()


@pytest.mark.parametrize("provider", ["fastrl cpu", "fastrl cpu, half the loss", "eager"])
@pytest.mark.parametrize("failure", ["", "RuntimeError: no kernel"])
def test_a_failure_of_fastrl_is_one_of_the_run(run, monkeypatch, provider, failure):
    _give(run, monkeypatch, provider=provider, failure=failure)
    assert run.main() == int(bool(failure) and provider != "eager")


def test_a_failure_in_calls_of_different_lengths_is_one_of_the_run(run, monkeypatch):
    _give(run, monkeypatch, lengths="ValueError: too long")
    assert run.main() == 1


def test_no_case_is_no_success(run, capsys):
    run.options.only = "nosuchcase"
    assert run.main() == 1
    assert "no case has 'nosuchcase' in its name" in capsys.readouterr().out


def _give(run, monkeypatch, *, provider="fastrl cpu", failure="", lengths=""):
    """Have jobs end at once, all cases with the same provider."""
    row = {"provider": provider, "kind": "eager", "samples": [] if failure else [1.0]}
    row |= {"host": None, "peak": 0, "error": None, "failure": failure}
    case = {"label": "a case", "work": "work", "op": "gae", "shape": "1 x 1", "dtype": "float32"}
    case |= {"flops": 0, "bytes_moved": 1, "small": False, "graphs": [], "providers": [row]}

    def make(jobs, until):
        for job in jobs:
            if job == "lengths" and lengths:
                run.journal.append(job=job, failure=lengths)
            else:
                run.journal.append(job=job, result=case if job.isdigit() else {"rate": 1.0})

    monkeypatch.setattr(run, "_make", make)


def test_a_killed_run_keeps_its_cases(tmp_path):
    command = [sys.executable, str(BENCH / "gpu.py"), "--smoke", "--out", str(tmp_path)]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
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


def test_a_journal_is_read_up_to_the_line_that_was_cut(bench, tmp_path):
    journal = bench("gpu_journal").Journal(tmp_path)
    journal.append(job="0", started=1.0)
    with journal.path.open("a") as file:
        file.write('{"job": "0", "resu')
    assert journal.unfinished() == ["0"]
    journal.append(job="0", result={})
    assert journal.unfinished() == []
    assert len(journal.entries()) == 2


def test_the_version_of_a_peer_is_of_what_is_imported(bench, monkeypatch, tmp_path):
    gpu = bench("gpu")
    for place, number in (("second", "1.0"), ("first", "2.0")):
        folder = tmp_path / place / f"liger_kernel-{number}.dist-info"
        folder.mkdir(parents=True)
        folder.joinpath("METADATA").write_text(f"Name: liger_kernel\nVersion: {number}\n")
        monkeypatch.syspath_prepend(str(tmp_path / place))
    assert gpu.machine(torch.device("cpu"))["liger-kernel"] == "2.0"
    assert gpu.version("no-such-package") == "not installed"


def test_a_provider_that_fails_later_is_a_row(bench):
    timing, case = bench("gpu_timing"), bench("timing").Case
    calls = []

    def fails_later(inputs):
        calls.append(inputs)
        if len(calls) > 2:
            raise MemoryError("no more")
        return inputs["x"]

    providers = [
        bench("timing").Provider("good", "fastrl cpu", lambda inputs: inputs["x"]),
        bench("timing").Provider("bad", "peer", fails_later),
        bench("timing").Provider("known", "peer", lambda inputs: inputs["x"]),
    ]
    pretended = case(
        "op", "work", "1", torch.float32, 4, lambda seed: {"x": torch.ones(1)}, providers,
        lambda answer, inputs: 0.0,
    )  # fmt: skip
    plan = timing.Plan(2, 3, 2, 0.1)
    left_out = {"known": "took the GPU with it"}
    tried = []
    found = timing.measure(pretended, torch.device("cpu"), plan, left_out, tried.append, small=True)
    assert tried == ["good", "bad", "known", "good", "bad", ""]
    good, bad, known = found
    assert len(good.samples) == 3
    assert good.host > 0
    assert bad.failure == "MemoryError: no more"
    assert known.failure == left_out["known"]
    assert known.samples == []
