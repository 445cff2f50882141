"""The order in which providers are called, their times and peak memory, and the conditions."""

import os
import platform
import subprocess
import sys
import time
import types

import pytest
import torch

from fastrl.bench import conditions
from fastrl.bench.case import Case, Provider, Size
from fastrl.bench.cases import SELECTIONS, cases
from fastrl.bench.conditions import COPY, OTHERS, Conditions
from fastrl.bench.timing import LATE, Plan, measure

CPU = torch.device("cpu")
KINDS = ("fastrl", "peer", "eager", "compile", "floor")
HURRIED = Plan(rounds=11, warmup=2, sets=1, seconds=3.0, least=1, hurried=True)


@pytest.fixture
def called():
    return []


@pytest.fixture
def make_case(called):
    """A function that makes a case of a provider of each kind, which notes that it is called."""

    def make(seconds=None):
        def provider(kind):
            def forward(inputs):
                called.append(kind)
                time.sleep((seconds or {}).get(kind, 0.0))
                return inputs["x"]

            return Provider(kind, kind, forward)

        size = Size("gae", "", 1, torch.float32)
        inputs = lambda seed: {"x": torch.ones(1)}  # noqa: E731
        providers = [provider(kind) for kind in KINDS]
        return Case(size, "forward", {"tokens": 1}, inputs, providers, lambda answer, inputs: 0.0)

    return make


def test_fastrl_and_eager_are_timed_before_others_are_called(make_case, called):
    told = []

    def so_far(found):
        told.append({one.name for one in found if one.seconds})

    found = measure(make_case(), CPU, HURRIED, so_far=so_far)
    assert [*dict.fromkeys(called)] == ["fastrl", "eager", "peer", "floor", "compile"]
    assert told[0] == {"fastrl", "eager"}
    assert told[-1] == {*KINDS}
    rounds = {one.name: {*one.seconds} for one in found}
    assert rounds["fastrl"] == {*range(11)}
    assert rounds["compile"] < rounds["peer"] < rounds["eager"] == rounds["fastrl"]


def test_a_slow_call_is_made_three_times(make_case, called):
    """For the answer, for the memory, and in one round."""
    measure(make_case({"peer": 1.01}), CPU, HURRIED._replace(seconds=1.0))
    assert called.count("peer") == 3 + 1  # and in a round beside torch.compile


@pytest.mark.parametrize("plan", [HURRIED, HURRIED._replace(hurried=False)])
def test_what_time_does_not_allow_is_named_and_the_rest_is_kept(make_case, plan):
    found = measure(make_case(), CPU, plan, {"floor": "it died"}, until=time.monotonic())
    failures = {one.name: one.failure for one in found if one.failure}
    late = dict.fromkeys(("peer", "compile"), LATE) if plan.hurried else {}
    assert failures == {"floor": "it died", **late}
    assert all(len(one.seconds) == 1 for one in found if not one.failure)


def test_a_case_leaves_time_for_the_others():
    now = time.monotonic()
    assert HURRIED.until(now + 60, jobs=6) == pytest.approx(now + 20, abs=1)
    assert HURRIED.until(now + 60, jobs=1) == now + 60
    assert Plan().until(now + 60, jobs=6) == now + 60


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_quick_selection_compiles_twice_and_begins_with_the_linear_loss(device):
    sizes = SELECTIONS[f"quick-{device}"]
    found = cases(sizes, ["both"], CPU, [], ["eager", "compile"], sparing=True)
    assert [case.size.op for case in found][:2] == ["linear_policy_loss", "logits_policy_loss"]
    names = [provider.name for case in found for provider in case.providers]
    assert names.count("torch.compile") == 2
    assert not any(" in bfloat16" in name for name in names if not name.startswith("bare"))


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
    found.copies += [3.0, 1.0, 8.0]
    assert found.found() == {COPY: 3.0}
    found.take()
    assert found.copies[-1] > 0
    assert torch.equal(found.source, found.target)


PEAKS = """
import torch
from fastrl.bench.memory import Peak, keep_freed

def call():
    first = torch.ones(2**23)
    second = first + 1
    del first
    third = torch.cat([second, second])  # larger than what was freed
    del second
    return third + 1

for _ in range(2):
    keep_freed(False)
    call()
    with Peak(torch.device("cpu")) as peak:
        call()
    print(peak.bytes)
    keep_freed(True)  # as while calls are timed; what stays then leaves a hole in the heap
    hole = torch.ones(2**26)
    stays = torch.ones(2**20)
    del hole
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not os.access("/proc/self/clear_refs", os.W_OK),
    reason="needs glibc, and Linux with a high-water mark that can be reset",
)
def test_a_peak_does_not_contain_what_was_freed():
    command = [sys.executable, "-c", PEAKS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    most = 4 * 4 * 2**23  # the last two tensors
    peaks = [int(line) for line in done.stdout.split()]
    assert peaks == [pytest.approx(most, rel=0.05)] * 2
