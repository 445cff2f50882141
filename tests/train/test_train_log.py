"""The log: report, curves, samples, lines, trackers and phases, whatever the texts contain."""

import html
import json
import math
import mmap
import random
import re
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train import report
from fastrl.train.config import GrpoConfig
from fastrl.train.phases import Phases
from fastrl.train.prompts import Prompt
from fastrl.train.run_log import RunLog, printable
from fastrl.train.trackers import Trackers

TAGS = "</pre></td><script>alert(1)</script><img src=x onerror=a>&#60;{{ 7*7 }}$x^$"
HOSTILE, SEEN = TAGS + "\x1b[2J\x9b\u202e\ud800", TAGS + r"\x1b[2J\x9b\u202e\ud800"
ROWS = [
    {"step": 0, "held_out_reward": 0.125, "seconds_start": 10.0},
    {"step": 1, "reward": 0.5, "reward/a": 1.0, "seconds_learn": 30.0, "peak_gb_learn": 2.0},
    {"step": 2, "reward": 0.75, "seconds_learn": 20.0, "held_out_reward": 0.875},
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hostile_text_is_text_on_the_page_and_nothing_is_fetched(tmp_path, monkeypatch, device):
    """Peak memory is measured by phase on a GPU, and for the whole process on a CPU."""
    monkeypatch.setattr(report, "find_device", lambda _: torch.device(device))
    sample = {"step": 2, "chosen": "best", "reward": None, "parts": {HOSTILE: None, "b": 1.0}}
    samples = [{**sample, "prompt": HOSTILE, "completion": HOSTILE * 999}]
    samples.append({**samples[0], "answer": HOSTILE})
    rows = [*ROWS, {"step": 3, f"reward/{HOSTILE}": 0.5, f"seconds_{HOSTILE}": 0.0}]
    config = GrpoConfig(model=HOSTILE, learning_rate=1e-5)
    report.write_report(tmp_path, config, rows, samples)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    cells = [html.unescape(cell) for cell in re.findall(r">([^<>]*)</(?:td|pre|th|div)>", page)]
    assert cells.count(SEEN) == 6  # two prompts, an answer, a phase, and the model twice
    assert "Expected answer" in cells
    assert page.count('"value">none<br>') == 2
    assert re.findall(r"<(?:script|link|iframe|svg|img [^a].{9})", page) == ['<img src="data:']
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
    assert all(c == "\n" or c.isprintable() for c in page)
    assert any(cell.endswith(" more characters") for cell in cells)
    assert cells[cells.index("learn") :][:3] == ["learn", "50.0", "83.3%"]
    assert cells[cells.index("2.00") - 1] in ("83.3%", "Peak memory of the process, GB")
    assert ("Peak memory, GB" in cells) == (cells[cells.index("2.00") - 1] == "83.3%")
    assert ("Peak memory, GB" in cells) == (device == "cuda")
    assert cells.index("learning_rate") < cells.index("seed")  # what was changed comes first


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [(1e308, -1e308), (3e38, -3e38), (float("nan"), float("inf"))])
def test_curves_are_drawn_with_any_values(tmp_path, values):
    rows = [{"step": 3 + i, "reward": y, "kl": y} for i, y in enumerate(values)]
    report.draw([*ROWS, *rows], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def log(directory):
    return RunLog(GrpoConfig(out=str(directory), steps=1000))


def test_samples_are_the_best_the_worst_and_a_random_one_which_repeats(tmp_path, capsys):
    texts = [f"{i}{HOSTILE}" + 999 * "x" for i in range(999)]
    prompts, state, kept = [Prompt({"prompt": text}, []) for text in texts], random.getstate(), []
    for run in (log(tmp_path / "one"), log(tmp_path / "two")):
        for step in (10, 15, 20):
            run.collect(step, prompts, texts, {"reward": torch.arange(999.0)})
            run.write({"step": step})
        stored = (run.directory / "samples.jsonl").read_text()
        assert stored.replace("\n", "").isprintable()
        kept.append([json.loads(line) for line in stored.splitlines()])
    assert random.getstate() == state
    assert kept[0] == kept[1] == run.samples.rows
    assert [one["chosen"] for one in kept[0]] == ["best", "worst", "random"] * 2
    assert [one["completion"] for one in kept[0]][:2] == [texts[998], texts[0]]
    assert kept[0][2]["completion"] != kept[0][5]["completion"]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("step 10 best 998: '998</pre>")
    assert all(line.isprintable() and len(line) < 300 for line in shown)
    for text in ("plain 'text' \\x1b", "größer 中文 🙂 é", SEEN):  # is as it was
        assert printable(text) == text


def test_samples_show_the_expected_answer_and_where_there_is_no_reward(tmp_path, capsys):
    run, prompts = log(tmp_path), [Prompt({"prompt": "a", "answer": 7}, [])]
    prompts += [Prompt({"prompt": "c"}, [])] * 4
    rewards = torch.tensor([math.nan, 1.0, math.nan, 0.0, 2.0])
    parts = {"reward": rewards, "own": rewards}
    run.collect(10, prompts, ["x", "y", None, "v", "w"], parts)
    run.write({"step": 10})
    stored = [json.loads(line) for line in (tmp_path / "samples.jsonl").open()]
    assert [(one["chosen"], one["completion"]) for one in stored[:2]] == [
        ("best", "w"),
        ("worst", "v"),
    ]
    run.collect(20, prompts[:1], ["x"], {"reward": rewards[:1], "own": rewards[:1]})
    run.write({"step": 20})
    assert run.samples.rows[-1] == {
        "step": 20,
        "prompt": "a",
        "completion": "x",
        "answer": "7",
        "reward": None,
        "parts": {"own": None},
        "chosen": "random",
    }
    assert "answer" not in stored[0]
    assert "NaN" not in (tmp_path / "samples.jsonl").read_text()
    assert "step 20 random no reward own no reward: 'a' -> 'x'" in capsys.readouterr().out


def test_without_a_terminal_there_are_few_lines(tmp_path, capsys, monkeypatch):
    """One per twentieth of the way, or after five minutes."""
    run, now = log(tmp_path / "a"), [0.0]
    monkeypatch.setattr("fastrl.train.run_log.time.monotonic", lambda: now[0])
    with run.following("a", 1000):
        for step in range(101):
            now[0] += 301 if step == 77 else 0
            run.write({"step": step, "reward": step / 1000})
    expected = [f"a {n}/1000 reward={n / 1000:.3g}" for n in (0, 50, 77, 100)]
    assert capsys.readouterr().err.splitlines() == expected
    monkeypatch.setattr("fastrl.train.run_log.write_report", lambda *_: 1 / 0)
    run.finish(failed=False)
    assert "no report could be written: ZeroDivisionError" in capsys.readouterr().out


def tracked(directory, name, rows):
    """What is said while the rows are tracked."""
    trackers = Trackers(GrpoConfig(track=(name,)), directory, "0123abcd", (said := []).append)
    for row in rows:
        trackers.write(row)
    trackers.close(failed=False)
    return said


def test_tensorboard_has_every_step_once_also_after_a_cut(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    again = [{"step": 2, "reward": 9.0}, {"step": 3, "reward": 1.0}]
    assert [tracked(tmp_path, "tensorboard", rows) for rows in (ROWS, again)] == [[], []]
    stored = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in stored.Scalars("reward")]
    assert found == [(1, 0.5), (2, 9.0), (3, 1.0)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_continues_its_run_and_one_that_fails_is_named_once(tmp_path, monkeypatch, name):
    def log(row, step):
        sent.append(step)
        random.random()  # must not reach the run
        if step == 2:
            raise OSError("no space left")

    begun, sent, ended, state = [], [], [], random.getstate()
    run = SimpleNamespace(log=log, finish=lambda **options: ended.append(options))
    module = SimpleNamespace(init=lambda **options: begun.append(options) or run, Settings=dict)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    assert tracked(tmp_path, name, ROWS[:2]) == []
    (said,) = tracked(tmp_path, name, [ROWS[2], {"step": 3}])
    assert said.startswith(f"track {name}: OSError: no space left; the run continues without it")
    assert (sent, len(ended)) == ([0, 1, 2], 1)
    assert begun[0] == begun[1]
    assert [begun[0][key] for key in ("project", "resume")] == ["mine", "allow"]
    assert random.getstate() == state
    monkeypatch.setitem(sys.modules, name, None)
    assert len(tracked(tmp_path, name, ROWS)) == 1  # it is missing


def test_the_seconds_and_peaks_of_phases(monkeypatch):
    phases, now = Phases(torch.device("cpu")), [100.0]
    monkeypatch.setattr("fastrl.train.phases.time.perf_counter", lambda: now[0])
    for megabytes in (0, 100, 0):
        with phases("learn"):
            now[0] += 2.0
        with phases("generate"):
            fresh = mmap.mmap(-1, megabytes * 1_000_000 + 1)  # no memory that was in use before
            now[0] += torch.frombuffer(fresh, dtype=torch.uint8).fill_(1)[0].item()
            del fresh
        now[0] += 50.0  # between the phases
    row = phases.read()
    assert (row["seconds_generate"], row["seconds_learn"]) == (3.0, 6.0)
    if "peak_gb_learn" in row:  # elsewhere than on Linux nothing tells
        assert 0.09 < row["peak_gb_generate"] - row["peak_gb_learn"] < 0.15
    assert phases.read() == {}
