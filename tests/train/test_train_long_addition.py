"""The embedded task with long completions, and the defaults that it brings."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from fastrl.train import grpo
from fastrl.train.command_line import parse
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.data.long_addition import DIGITS, right_sum, split
from fastrl.train.data.prompts import encode, read_jsonl
from fastrl.train.data.tasks import SPLITS
from fastrl.train.model.loading import load
from fastrl.train.run.run_directory import check_resumable, settings_of
from fastrl.train.warm_start import warm_start_steps

LINE = re.compile(r"(?:(_*)(\d+)\+(_*)(\d+):)? (\d)\+(\d)\+([01])=(\d\d) (\d+)(_*)")


@pytest.fixture(scope="module")
def records():
    return split(0)


def numbers(record):
    a, b = record["prompt"].removesuffix(":").split("+")
    return a, b


def carries(record, text):
    """The carries that each line was handed, and those that it used; checks all other steps."""
    a, b = numbers(record)
    *lines, total = text.split("\n")
    assert len(lines) == len(a) == len(b) == DIGITS
    handed, used, written = [], [], ""
    for done, line in enumerate(lines):
        gap_a, rest_a, gap_b, rest_b, x, y, carry, digits, sofar, gap = LINE.fullmatch(
            line
        ).groups()
        if done:
            assert (gap_a, rest_a) == (gap_b, a[:-done]) == ("_" * done, a[:-done])
            assert rest_b == b[:-done]
        assert (x, y) == (a[-1 - done], b[-1 - done])
        assert int(digits) == int(x) + int(y) + int(carry)
        written = digits[1] + written
        assert (sofar, len(sofar + gap)) == (written, DIGITS)
        used.append(int(carry))
        handed.append(int(digits[0]))
    assert total in ("_" + written, "1" + written)
    return handed, [*used[1:], int(total[0] == "1")]


def test_every_demonstration_is_right_but_for_carries_it_forgets(records):
    forgotten = possible = right = 0
    for record in records[0]:
        for text in record["demonstrations"]:
            handed, used = carries(record, text)
            assert all(one <= other for one, other in zip(used, handed, strict=True))
            possible += sum(handed)
            forgotten += sum(handed) - sum(used)
            answer = text.split("\n")[-1].lstrip("_")
            assert (answer == record["answer"]) == (used == handed)
            assert right_sum([record["prompt"]], [text], [record]) == [used == handed]
            right += used == handed
    assert 0.58 < forgotten / possible < 0.62
    assert 0.1 < right / (2 * len(records[0])) < 0.2


def test_answers_are_the_sums(records):
    for record in records[0] + records[1]:
        a, b = numbers(record)
        assert record["answer"] == str(int(a) + int(b))


@pytest.mark.parametrize("seed", [0, 1])
def test_no_sum_is_trained_on_and_held_out_in_either_order(seed):
    train, held_out = split(seed)
    pairs = [frozenset(numbers(record)) for record in train + held_out]
    assert (len(train), len(held_out)) == (4096, 256)
    assert len(set(pairs)) == len(pairs)
    assert (train, held_out) == split(seed)
    assert held_out != split(seed + 1)[1]


def test_completions_are_long_and_fit_the_default_limit(records):
    lengths = [len(text) for record in records[0] for text in record["demonstrations"]]
    assert min(lengths) > 150
    _, tokenizer = load(None, "cpu")
    longest = max((text for r in records[0] for text in r["demonstrations"]), key=len)
    tokens = len(tokenizer(longest, add_special_tokens=False)["input_ids"])
    assert tokens + 1 <= GrpoConfig(task="long_addition").max_new_tokens
    encode(records[1], tokenizer, chat_template=False, max_tokens=2 * DIGITS + 2)


def test_only_the_last_line_is_rewarded():
    for answer, last in (("1489398", "1489398"), ("489398", "_489398")):
        wrong = last[:-1] + "9"
        texts = [last, f"nonsense\n{last}", f"{last}\n{wrong}", f"{last}\n", f" {last}", "", "0"]
        texts += ["_" + last, last[1:]]
        asked = [{"prompt": "985440+503958:", "answer": answer}] * len(texts)
        rewards = right_sum([record["prompt"] for record in asked], texts, asked)
        assert rewards == [1, 1, 0, 0, 0, 0, 0, 0, 0]


def test_the_files_are_written(tmp_path):
    module = "fastrl.train.data.long_addition"
    command = [sys.executable, "-m", module, "--out", tmp_path, "--seed", "3"]
    subprocess.run(command, check=True, capture_output=True)
    for name, wanted in zip(("train", "held_out"), split(3), strict=True):
        assert read_jsonl(tmp_path / f"{name}.jsonl") == wanted


def test_the_task_brings_defaults_and_what_is_given_wins():
    plain, long = parse(GrpoConfig, []), parse(GrpoConfig, ["--task", "long_addition"])
    assert (plain.task, plain.max_new_tokens, plain.warm_start_batch) == ("arithmetic", 4, 128)
    assert plain.reward == ("exact_match",)
    assert (long.max_new_tokens, long.warm_start_batch) == (192, 16)
    assert long.reward == ("fastrl.train.data.long_addition:right_sum",)
    assert warm_start_steps(long) != warm_start_steps(plain)
    given = ["--task", "long_addition", "--max-new-tokens", "200", "--steps", "100"]
    config = parse(GrpoConfig, given)
    assert (config.max_new_tokens, config.steps) == (200, 100)  # the default of the other task
    assert replace(config, seed=1).steps == 100
    assert (PpoConfig().prompts_per_step, GrpoConfig().prompts_per_step) == (512, 64)


def test_the_defaults_of_the_task_are_recorded_and_in_the_help(tmp_path, capsys):
    recorded = settings_of(GrpoConfig(task="long_addition"))
    assert recorded["max_new_tokens"] == 192
    assert None not in (recorded["steps"], recorded["prompts_per_step"], recorded["reward"])
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    again = parse(GrpoConfig, ["--config", str(tmp_path / "config.json")])
    assert settings_of(again) == recorded
    with pytest.raises(SystemExit, match="0"):
        parse(GrpoConfig, ["--help"])
    assert "(default: 4; long_addition: 192)" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_lacks_a_setting_had_the_default_of_its_task():
    config = GrpoConfig(task="long_addition")
    before = settings_of(config)
    del before["max_new_tokens"]
    check_resumable(config, before)
    with pytest.raises(ValueError, match="max_new_tokens must remain 192"):
        check_resumable(replace(config, max_new_tokens=193), before)
    with pytest.raises(ValueError, match="task must remain 'long_addition'"):
        check_resumable(GrpoConfig(), before)


def test_a_task_that_cannot_be_honoured_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="task must be one of arithmetic, long_addition, got 'x'"):
        GrpoConfig(task="x")
    files = {"train_file": "a.jsonl", "held_out_file": "b.jsonl"}
    with pytest.raises(ValueError, match=r"train_file must not be given with .* long_addition"):
        GrpoConfig(task="long_addition", **files)
    short = GrpoConfig(task="long_addition", max_new_tokens=100, out_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"max_new_tokens must be at least 1\d\d for the task"):
        grpo.train(short)
    assert not list(tmp_path.iterdir())


def test_a_run_of_the_task_is_warm_started_and_keeps_its_data(tmp_path, monkeypatch):
    few = partial(split, held_out=2, train=4)
    monkeypatch.setitem(SPLITS, "long_addition", few)
    changes = {"warm_start_steps": 1, "warm_start_batch": 2, "prompts_per_step": 1}
    small = {"group_size": 2, "minibatches": 1, "steps": 1}
    config = GrpoConfig(task="long_addition", out_dir=str(tmp_path), **changes, **small)
    summary = grpo.train(config)
    assert summary.step == 1
    for name, wanted in zip(("train", "held_out"), few(0), strict=True):
        assert read_jsonl(summary.directory / "data" / f"{name}.jsonl") == wanted
    (checkpoint,) = (summary.directory / "checkpoints").glob("step-000001")
    assert json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"] == 512
