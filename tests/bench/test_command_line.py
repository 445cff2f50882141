"""The options of `fastrl bench`: what they choose, and what is said of bad ones."""

from pathlib import Path

import pytest
import torch

from fastrl.bench import command_line
from fastrl.bench.cases import Size
from fastrl.bench.command_line import _parser, _settings
from fastrl.bench.settings import Settings


def settings(*arguments):
    return _settings(_parser().parse_args(["--device", "cpu", *arguments]))


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
    assert Settings.from_json(found.to_json()) == found
    assert found.peers == ()
    names = [one.name for case in found.cases() for one in case.providers if one.kind != "floor"]
    assert names
    assert all(name.startswith("fastrl cpu") for name in names)


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
    options = ["--smoke", "--op", "gae", "--peer", "none", "--device", "cpu"]
    assert command_line.main([*options, "--out", "/proc/self"]) == 1
    assert capsys.readouterr().err.endswith("'/proc/self/journal.jsonl'\n")


def test_everything_that_can_be_chosen_is_listed(capsys):
    assert command_line.main(["--list"]) == 0
    said = capsys.readouterr().out
    for text in ("linear_policy_loss      '32 kept', '512 kept'", "qwen3-0.6b    1024 x 151936"):
        assert text in said
    lengths = "'128 tokens each', '1024 tokens each', '2048 tokens each', '4096 tokens each'"
    assert f"gae                     '40 tokens each', {lengths}" in said
    assert "reference     works" in said
    assert "liger-kernel" in said
