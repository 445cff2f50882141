"""The bar of a run fits its terminal; without a terminal there are a few plain lines."""

import io
import json
import re
import sys

import pytest

pytest.importorskip("transformers")

from fastrl.train.run import progress
from fastrl.train.run.progress import ProgressBar, fitting, on_bar
from tests.support.train_runs import on_terminal, run

ROW = {
    "reward": 0.51234,
    "held_out_reward": 0.91015625,
    "reward_std": 0.25,
    "learning_rate": 2e-5,
    "kl_old": 0.000123,
    "entropy": 1.234567,
    "clip_fraction": 0.12345,
    "tokens_per_second": 21345.678,
    "seconds_generate": 6.0,
    "seconds_learn": 4.0,
    "peak_gb_learn": 23.4567,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def frames(text):
    """What a terminal shows in a line, one after another."""
    return [frame for frame in re.split(r"[\r\n]|\x1b\[A", text) if frame.strip()]


@pytest.mark.parametrize("columns", [80, 200])
def test_the_line_fits_the_terminal_and_begins_with_the_reward(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", Terminal())
    bar = ProgressBar("grpo-12", 10_000)
    bar.show(1234, ROW)
    bar.close()
    last = frames(sys.stderr.getvalue())[-1]
    assert all(len(frame) <= columns for frame in frames(sys.stderr.getvalue()))
    assert last.startswith("grpo-12 1234/10000 |")
    assert ", reward=0.512 held_out=0.91" in last
    whole = " ".join(f"{name}={value}" for name, value in on_bar(ROW).items())
    assert (whole in last) == (columns == 200)


def test_without_a_terminal_there_are_few_lines_and_no_carriage_return(capsys):
    bar = ProgressBar("grpo-1", 1000)
    for step in range(1001):
        bar.show(step, {"reward": step / 1000})
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"grpo-1 {n}/1000 reward={n / 1000:.3g}" for n in range(50, 1001, 50)]


def test_without_a_terminal_a_slow_run_is_heard_of_every_five_minutes(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = ProgressBar("a", 1000, done=7)
    for step, seconds in ((8, 200.0), (9, 299.0), (10, 300.0), (11, 301.0), (12, 601.0)):
        now[0] = seconds
        bar.show(step, {})
    bar.close()
    assert capsys.readouterr().err.split() == ["a", "10/1000", "a", "12/1000"]


def test_a_name_with_escapes_or_braces_is_text(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    bar = ProgressBar("a\x1b[2J{0}{n}", 10)
    bar.show(3, {})
    bar.close()
    assert r"a\x1b[2J{0}{n} 3/10 |" in sys.stderr.getvalue()


def test_values_are_left_out_whole_from_the_end():
    values = ["reward=0.5", "std=0.25", "lr=1"]
    assert fitting(values, 100) == "reward=0.5 std=0.25 lr=1"
    assert fitting(values, 23) == "reward=0.5 std=0.25"
    assert fitting(values, 9) == fitting([], 9) == ""


def test_deviation_and_learning_rate_are_on_the_bar():
    shown = on_bar(ROW)
    assert (shown["std"], shown["lr"]) == ("0.25", "2e-05")


def test_the_warm_start_is_on_a_bar_of_its_own(small, capsys):
    own = {"train_file": None, "held_out_file": None, "reward": "small_rewards:constant"}
    summary = run("grpo", small, name="a", warm_start_steps=40, warm_start_batch=4, steps=1, **own)
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("warm start ")]
    assert [line.split()[2] for line in lines] == [f"{n}/40" for n in range(2, 41, 2)]
    assert all(re.search(r" loss=\d", line) for line in lines)
    assert "warm start" not in shown.out
    assert (
        json.loads((summary.directory / "metrics.jsonl").read_text().splitlines()[0])["step"] == 0
    )
    run("grpo", small, name="b", steps=1)
    assert "warm start" not in capsys.readouterr().err


@pytest.mark.parametrize("told", [80, 0])
def test_in_a_terminal_of_80_columns_no_line_of_a_run_is_broken(small, tmp_path, told):
    settings = {**small, "name": "a", "steps": 3, "group_size": 4, "sample_every": 0}
    settings |= {"warm_start_steps": 5}
    status, shown, out = on_terminal(tmp_path, settings, columns=told, piped=True)
    assert status == 0, shown
    bars = [line for line in frames(shown.decode()) if re.match(r"(a|warm start) \d+/\d+ \|", line)]
    assert all(len(line) <= 80 for line in bars)
    assert any(line.startswith("warm start 5/5 |") and "loss=" in line for line in bars)
    assert bars[-1].startswith("a 3/3 |")
    assert ", reward=" in bars[-1]
    assert "report: " in out
    assert "\r" not in out
