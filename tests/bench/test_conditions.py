"""What the machine could do while a case was timed."""

import types

import pytest
import torch

from fastrl.bench import conditions, report
from fastrl.bench.conditions import COPY, OTHERS, Conditions


@pytest.fixture
def status(monkeypatch, tmp_path):
    monkeypatch.setattr(conditions, "Path", lambda name: tmp_path / "stat")
    return tmp_path / "stat"


def test_what_others_took_is_a_share_of_all_time(status, monkeypatch):
    own = types.SimpleNamespace(user=0.0, system=0.0)
    monkeypatch.setattr(conditions.os, "times", lambda: own)
    monkeypatch.setattr(conditions.os, "sysconf", lambda name: 100)
    found = Conditions()
    status.write_text("cpu  10 0 10 70 0 0 0 10 0 0\ncpu0 5 0 5 35 0 0 0 5 0 0\n")
    found.take()
    status.write_text("cpu  40 0 20 100 10 0 0 30 0 0\ncpu0 20 0 10 50 5 0 0 15 0 0\n")
    own.user = 0.25  # of the 60 busy ticks 25 are this process's, and 35 of 100 others'
    assert found.found()[OTHERS] == pytest.approx(0.35)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3 4 5 6 7\n", "cpu  a b\n"])
def test_where_the_system_does_not_tell_it_is_left_out(text, status):
    if text is not None:
        status.write_text(text)
    found = Conditions()
    found.take()
    assert found.found().keys() == {COPY}


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
    assert not any("timed:" in line for line in report.section(case, {}))
    lines = report.section(case | {COPY: 41.5}, {COPY: 68.0})
    assert "While this was timed: copies 41.5 GB/s." in lines
    lines = report.section(case | {COPY: 41.5, OTHERS: 0.021}, {COPY: 68.0})
    assert "While this was timed: copies 41.5 GB/s, 2.1% of the cores taken by others." in lines
