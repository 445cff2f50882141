"""`fastrl bench --quick`: the most telling first, and what time does not allow is named."""

import subprocess
import sys
import time

import pytest
import torch

from fastrl.bench import command_line, estimate, report
from fastrl.bench.case import Case, Provider, Size
from fastrl.bench.cases import SELECTIONS, cases
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
    found = measure(make_case(), CPU, plan, until=time.monotonic())
    late = {one.name for one in found if one.failure == LATE}
    assert late == ({"peer", "compile", "floor"} if plan.hurried else set())
    assert all(len(one.seconds) == 1 for one in found if one.name not in late)


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


def test_nothing_is_imported_that_takes_no_part():
    code = (
        "import sys; from fastrl.bench.command_line import _parser, _settings\n"
        "_settings(_parser().parse_args(['--device', 'cpu'])).cases()\n"
        "print({'torch._dynamo', 'torch._inductor', 'trl', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


ROW = {"name": "fastrl cpu", "kind": "fastrl", "seconds": {"0": 1e-3}, "peak": None, "error": None}
ROW |= {"host": None, "kernels": None, "failure": ""}
CASE = {"name": "gae", "dtype": "float32", "flops": 0, "bytes_moved": 1, "providers": [ROW]}


@pytest.mark.parametrize(
    ("results", "status", "said"),
    [
        ([{"job": "gae", "result": CASE}], 0, "written"),
        ([], 0, f"{LATE}: gae\nmore time, from here: the same command with --resume"),
        ([{"job": "gae", "failure": "it died"}], 1, "FAILED: gae: it died"),
        (
            [{"job": "gae", "partial": CASE | {"providers": [ROW, ROW | {"seconds": {}}]}}],
            0,
            f"{LATE}: gae: fastrl cpu\n",
        ),
        (
            [{"job": "gae", "result": CASE | {"providers": [ROW | {"failure": "wrong"}]}}],
            1,
            "FAILED: gae: fastrl cpu: wrong",
        ),
    ],
)
def test_only_a_failure_of_fastrl_or_of_a_case_is_one(
    results, status, said, monkeypatch, tmp_path, capsys
):
    found = report.results(results, ["gae"])

    class Run:
        def __init__(self, *settings, **limits): ...

        def main(self, *, resume):
            return found

    monkeypatch.setattr(command_line, "Run", Run)
    assert (
        command_line.main(["--quick", "--device", "cpu", "--no-plots", "--out", str(tmp_path)])
        == status
    )
    assert said in capsys.readouterr().out


def test_tiny_shapes_have_no_ratios():
    with_ratio, without = (report.section(CASE, {}, ratios=ratios) for ratios in (True, False))
    assert "time / fastrl" in with_ratio[2]
    assert "fastrl |" not in without[2]
    assert {line.count("|") for line in without[2:5]} == {6}


def test_a_run_says_how_long_it_takes():
    found = cases(SELECTIONS["cpu"][:2], ["both"], CPU, ["cpu"], ["eager", "compile"])
    said = estimate.in_words(found, Plan(), {"copy GB/s": 10.0}, 3600.0)
    assert said.startswith("2 cases: about ")
    assert said.endswith("the run ends after 60 minutes (--seconds)")
    slow, fast = (estimate.seconds(found, Plan(), {"copy GB/s": rate}) for rate in (1.0, 100.0))
    assert 20 < fast < slow < 200
    said = estimate.in_words(found, HURRIED, {}, 106.0)
    assert said == "2 cases, the most telling first, in at most 106 seconds"


def test_late_is_no_failure_that_costs_the_others(make_case):
    left = {"peer": "it died"}
    found = measure(make_case(), CPU, HURRIED, left, until=time.monotonic())
    assert {one.name: one.failure for one in found}["peer"] == "it died"
