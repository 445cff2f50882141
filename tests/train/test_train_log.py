"""The log: report, curves, samples, lines, trackers and phases, whatever the texts contain."""

import json
import random
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import matplotlib.figure
import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train import phases as measured
from fastrl.train import report, run_log
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


class Page(HTMLParser):
    """A report, with the elements and the texts in them."""

    def __init__(self, directory, text, rows):
        super().__init__()
        self.elements, self.texts = [], []
        sample = {"step": 2, "chosen": "best", "reward": 0.5, "parts": {text: 1.0}}
        samples = [{**sample, "prompt": text, "completion": text * 999}]
        config = GrpoConfig(model=text, learning_rate=1e-5)
        report.write_report(directory, config, rows, samples)
        self.written = (directory / "report.html").read_text(encoding="utf-8")
        self.feed(self.written)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, [name for name, _ in attributes]))
        self.texts.append("")

    def handle_data(self, data):
        self.texts[-1] += data


def test_hostile_text_is_text_on_the_page_and_nothing_is_fetched(tmp_path):
    ours = Page(tmp_path, "harmless", [*ROWS, {"step": 3, "seconds_evaluate": 0.0}])
    rows = [*ROWS, {"step": 3, f"reward/{HOSTILE}": 0.5, f"seconds_{HOSTILE}": 0.0}]
    theirs = Page(tmp_path, HOSTILE, rows)
    texts = [text.strip() for text in theirs.texts]
    assert theirs.elements == ours.elements
    assert texts.count(SEEN) == 4  # a prompt, a phase, and the model twice
    assert not {"script", "link"} & {tag for tag, _ in theirs.elements}
    assert [names for tag, names in theirs.elements if tag == "img"] == [["src", "alt"]]
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in theirs.written
    assert "http:" not in theirs.written
    assert all(c == "\n" or c.isprintable() for c in theirs.written)
    assert any(text.endswith(" more characters") for text in texts)
    assert texts[texts.index("learn") :][:4] == ["learn", "50.0", "83.3%", "2.00"]
    assert texts.index("learning_rate") < texts.index("seed")  # what was changed comes first


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [(1e308, -1e308), (3e38, -3e38), (float("nan"), float("inf"))])
def test_curves_are_drawn_with_any_values(tmp_path, monkeypatch, values):
    drawn, kind = [], matplotlib.figure.Figure
    save = kind.savefig
    monkeypatch.setattr(kind, "savefig", lambda f, *a, **o: drawn.append(f) or save(f, *a, **o))
    rows = [{"step": 3 + i, "reward": y, "kl": y} for i, y in enumerate(values)]
    report.draw([*ROWS, *rows], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    panels = {axes.get_title(): [line.get_label() for line in axes.lines] for axes in drawn[0].axes}
    assert panels["reward"] == ["reward", "held_out_reward"]
    assert panels["reward parts"] == ["reward/a"]
    assert len(panels["KL"]) == (values[0] == 3e38)


@pytest.fixture
def log(tmp_path):
    logs = []

    def make(name="a", **settings):
        logs.append(RunLog(GrpoConfig(out=str(tmp_path / name), **settings)))
        return logs[-1]

    yield make
    for each in logs:
        each.close()


def test_samples_are_the_best_the_worst_and_a_random_one_which_repeats(log, capsys):
    texts = [f"{i}{HOSTILE}" + 999 * "x" for i in range(999)]
    prompts, state, kept = [Prompt({"prompt": text}, []) for text in texts], random.getstate(), []
    for run in (log("one"), log("two")):
        for step in (10, 15, 20):
            run.collect(step, prompts, texts, {"reward": torch.arange(999.0)})
            run.write({"step": step})
        stored = (run.directory / "samples.jsonl").read_text()
        assert stored.replace("\n", "").isprintable()
        kept.append([json.loads(line) for line in stored.splitlines()])
    assert random.getstate() == state
    assert kept[0] == kept[1] == run.samples
    assert [one["chosen"] for one in kept[0]] == ["best", "worst", "random"] * 2
    assert [one["completion"] for one in kept[0]][:2] == [texts[998], texts[0]]
    assert kept[0][2]["completion"] != kept[0][5]["completion"]
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("step 10 best 998: '998</pre>")
    assert all(line.isprintable() and len(line) < 300 for line in (first, *others))


def test_what_no_terminal_prints_is_escaped_and_other_text_is_as_it_was():
    assert printable(HOSTILE) == SEEN
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"
    for text in ("", "plain 'text' \\x1b \"q\"", "größer 中文 🙂 é"):
        assert printable(text) == text


def test_without_a_terminal_there_are_few_lines_or_one_every_five_minutes(log, capsys, monkeypatch):
    run, now = log(steps=1000), [0.0]
    monkeypatch.setattr(run_log.time, "monotonic", lambda: now[0])
    run.follow(0)
    for step in range(101):
        now[0] += 301 if step == 77 else 0
        run.write({"step": step, "reward": step / 1000})
    expected = [f"a {n}/1000 reward={n / 1000:.3g}" for n in (0, 50, 77, 100)]
    assert capsys.readouterr().err.splitlines() == expected
    monkeypatch.setattr(run_log, "write_report", lambda *_: 1 / 0)
    run.finish(failed=False)
    assert "no report could be written: ZeroDivisionError" in capsys.readouterr().out


def test_a_resumed_log_has_no_step_twice_and_no_broken_line(log, capsys):
    run = log()
    run.begin(-1)
    for step in range(4):
        run.write({"step": step, "reward": step / 8})
    with (run.directory / "metrics.jsonl").open("a") as file:
        file.write('oops\n{"step": 4, "rew')
    run.close()
    again = log(resume=True)
    again.begin(1)
    again.write({"step": 2, "reward": 9.0})
    again.rewrite({"step": 2, "reward": 7.0})
    stored = (run.directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in stored] == [0.0, 0.125, 7.0]
    assert "metrics.jsonl line 5 is damaged" in capsys.readouterr().out


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
    (said,) = tracked(tmp_path, name, ROWS)
    assert said.startswith(f"track {name}: ModuleNotFoundError")


def test_wandb_offline_has_the_rows_and_no_secret(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("API_KEY", 40 * "e"), ("DIR", str(tmp_path))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert tracked(tmp_path, "wandb", [*ROWS, {"step": 3, "last_number": 0.8125}]) == []
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert all(text in path.read_bytes() for text in (b"last_number", b"0.8125", b"reward/a"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(40 * b"e" in path.read_bytes() for path in files)


def test_the_seconds_and_peaks_of_phases(monkeypatch):
    phases, now = Phases(torch.device("cpu")), [100.0]
    monkeypatch.setattr(measured.time, "perf_counter", lambda: now[0])
    for megabytes in (0, 100, 0):
        with phases("learn"):
            now[0] += 2.0
        with pytest.raises(KeyError), phases("generate"):
            now[0] += torch.ones(megabytes * 250_000 + 1)[0].item()
            raise KeyError("reward")  # noqa: PT012
        now[0] += 50.0  # between the phases
    row = phases.read()
    assert (row["seconds_generate"], row["seconds_learn"]) == (3.0, 6.0)
    if "peak_gb_learn" in row:  # elsewhere than on Linux nothing tells
        assert 0.09 < row["peak_gb_generate"] - row["peak_gb_learn"] < 0.15
    assert phases.read() == {}
