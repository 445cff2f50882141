"""The options of `fastrl bench`: what they choose, what is said of bad ones, and how it ends."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastrl.bench import command_line, report, run
from fastrl.bench.cases import SELECTIONS, Size, cases
from fastrl.bench.command_line import _parser, _settings
from fastrl.bench.timing import LATE, Plan

CPU = ("--device", "cpu")


def settings(*arguments):
    return _settings(_parser().parse_args([*CPU, *arguments]))


def test_named_sizes_replace_those_of_the_selection():
    options = ("--op", "token_logprobs", "gae", "--model", "gpt2", "tiny", "--rows", "8", "16")
    found = settings(*options, "--dtype", "float32", "--variant", "", "1024 tokens each")
    shapes = [
        Size("token_logprobs", name, n, torch.float32) for name in ("gpt2", "tiny") for n in (8, 16)
    ]
    gae = [Size("gae", "", n, torch.float32, "1024 tokens each") for n in (8, 16)]
    assert {*found.sizes} == {*shapes, *gae}


def test_an_operator_that_a_selection_lacks_is_taken_from_the_whole():
    assert {size.op for size in settings("--quick", "--op", "token_stats").sizes} == {"token_stats"}


def test_settings_reach_the_worker():
    found = settings("--smoke", "--pass", "backward", "--backend", "cpu", "--peer", "none")
    assert pickle.loads(pickle.dumps(found)) == found
    assert found.peers == ()
    names = [one.name for case in found.cases() for one in case.providers if one.kind != "floor"]
    assert names
    assert all(name.startswith("fastrl cpu") for name in names)


def test_nothing_is_imported_that_takes_no_part():
    code = (
        "import sys; from fastrl.bench.command_line import _parser, _settings\n"
        "_settings(_parser().parse_args(['--device', 'cpu'])).cases()\n"
        "print({'torch._dynamo', 'torch._inductor', 'trl', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "softmax"], "argument --op: invalid choice: 'softmax'"),
        (["--model", "gpt5"], "argument --model: invalid choice: 'gpt5'"),
        (["--rows", "-1"], "expected a positive number, got '-1'"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--variant", "blue"], "--op and --variant leave nothing to measure; --list has"),
        (["--peer", "nobody"], "peers must be among eager, compile"),
        (["--device", "cuda"], "--device cuda: there is no GPU that torch can use"),
        (["--backend", "cuda"], "--backend cuda: "),
        (["--seconds", "0"], "expected a positive number, got '0'"),
        (["--out", __file__], "File exists"),
    ],
)
def test_bad_options_are_named(arguments, said, capsys):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        command_line.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that refuses files")
def test_a_folder_that_cannot_be_written_is_named(capsys):
    options = ["--smoke", "--op", "gae", "--peer", "none", *CPU]
    assert command_line.main([*options, "--out", "/proc/self"]) == 1
    assert capsys.readouterr().err.endswith("'/proc/self/results.json.new'\n")


def test_everything_that_can_be_chosen_is_listed(capsys):
    assert command_line.main(["--list"]) == 0
    said = capsys.readouterr().out
    for text in ("linear_policy_loss      '32 kept', '512 kept'", "qwen3-0.6b    1024 x 151936"):
        assert text in said
    lengths = "'128 tokens each', '1024 tokens each', '2048 tokens each', '4096 tokens each'"
    assert f"gae                     '40 tokens each', {lengths}" in said
    assert "reference     works" in said
    assert "liger-kernel" in said


ROW = {"name": "fastrl cpu", "kind": "fastrl", "seconds": {"0": 1e-3}, "peak": None, "error": None}
ROW |= {"host": None, "kernels": None, "failure": ""}
CASE = {"name": "gae", "dtype": "float32", "flops": 0, "bytes_moved": 1e6, "providers": [ROW]}


@pytest.mark.parametrize(
    ("known", "status", "said"),
    [
        ({"found": CASE}, 0, "written"),
        ({}, 0, f"{LATE}: gae\nmore time, from here: the same command with --resume"),
        ({"failed": "it died"}, 1, "FAILED: gae: it died"),
        (
            {"partial": CASE | {"providers": [ROW, ROW | {"seconds": {}}]}},
            0,
            f"{LATE}: gae: fastrl cpu\n",
        ),
        (
            {"found": CASE | {"providers": [ROW | {"failure": "wrong"}]}},
            1,
            "FAILED: gae: fastrl cpu: wrong",
        ),
    ],
)
def test_only_a_failure_of_fastrl_or_of_a_case_is_one(
    known, status, said, monkeypatch, tmp_path, capsys
):
    def measured(self, jobs):
        self.names = ["gae"]
        for where, what in known.items():
            getattr(self, where)["gae"] = what

    monkeypatch.setattr(run.Run, "_make", measured)
    options = ["--quick", *CPU, "--no-plots", "--out", str(tmp_path)]
    assert command_line.main(options) == status
    assert said in capsys.readouterr().out


def test_a_table_has_the_conditions_and_of_tiny_shapes_no_ratios():
    with_ratio, without = (report.section(CASE, {}, ratios=ratios) for ratios in (True, False))
    assert "time / fastrl" in with_ratio[2]
    assert "fastrl |" not in without[2]
    assert {line.count("|") for line in without[2:5]} == {6}
    assert not any("timed:" in line for line in with_ratio)
    conditions = {"copy GB/s": 41.5, "taken by others": 0.021}
    lines = report.section(CASE | conditions, {"copy GB/s": 68.0})
    assert any("copies 41.5 GB/s, 2.1% of the cores taken by others." in line for line in lines)


def test_a_run_says_how_long_it_takes():
    found = cases(SELECTIONS["cpu"][:2], ["both"], torch.device("cpu"), ["cpu"], ["compile"])
    said = run.in_words(found, Plan(), {"copy GB/s": 10.0}, 3600.0)
    assert said.startswith("2 cases: about ")
    assert said.endswith("the run ends after 60 minutes (--seconds)")
    slow, fast = (run.seconds(found, Plan(), {"copy GB/s": rate}) for rate in (1.0, 100.0))
    assert 20 < fast < slow < 200
    said = run.in_words(found, Plan(hurried=True), {}, 106.0)
    assert said == "2 cases, the most telling first, in at most 106 seconds"
