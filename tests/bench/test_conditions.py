"""What the machine could do while a case was timed."""

import torch

from fastrl.bench import conditions, report
from fastrl.bench.conditions import COPY, STOLEN, Conditions


def test_stolen_time_is_a_share_of_all_time(monkeypatch, tmp_path):
    status = tmp_path / "stat"
    monkeypatch.setattr(conditions, "Path", lambda name: status)
    status.write_text("cpu  10 0 10 70 0 0 0 10 0 0\ncpu0 5 0 5 35 0 0 0 5 0 0\n")
    found = Conditions()
    found.take()
    status.write_text("cpu  20 0 20 110 0 0 0 50 0 0\ncpu0 10 0 10 55 0 0 0 25 0 0\n")
    assert found.found()[STOLEN] == 0.4  # 40 of 100 ticks


def test_where_the_system_does_not_tell_nothing_was_stolen(monkeypatch, tmp_path):
    monkeypatch.setattr(conditions, "Path", lambda name: tmp_path / "none")
    found = Conditions()
    found.take()
    assert found.found()[STOLEN] == 0


def test_a_copy_is_the_median_of_what_was_taken():
    found = Conditions()
    found.copies += [3.0, 1.0, 8.0]
    assert found.found()[COPY] == 3.0
    found.take()
    assert found.copies[-1] > 0
    assert torch.equal(found.source, found.target)


def test_the_conditions_stand_under_a_table():
    row = {"name": "fastrl cpu", "kind": "fastrl", "seconds": {"0": 1e-3}, "peak": None}
    row |= {"error": 1e-7, "host": None, "kernels": None, "failure": ""}
    case = {"name": "gae", "dtype": "float32", "flops": 0, "bytes_moved": 1e6, "providers": [row]}
    assert not any("stolen" in line for line in report.section(case, {}))
    lines = report.section(case | {COPY: 41.5, STOLEN: 0.021}, {COPY: 68.0})
    assert "While this was timed: copies 41.5 GB/s, 2.1% of the time stolen." in lines
