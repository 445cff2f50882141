"""The log: report, curves, samples, lines, trackers and phases, whatever the texts contain."""

import json
import random
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

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

HOSTILE = (
    "</pre></td><script>alert(1)</script><img src=x onerror=a>{{ 7*7 }}$x^$\x1b[2J\x9b\u202e\ud800"
)
SEEN = (
    "</pre></td><script>alert(1)</script><img src=x onerror=a>{{ 7*7 }}$x^$"
    + r"\x1b[2J\x9b\u202e\ud800"
)
ROWS = [
    {"step": 0, "held_out_reward": 0.125, "seconds_start": 10.0},
    {"step": 1, "reward": 0.5, "reward/a": 1.0, "seconds_learn": 30.0, "peak_gb_learn": 2.0},
    {"step": 2, "reward": 0.75, "reward/a": 1.0, "seconds_learn": 20.0, "held_out_reward": 0.875},
]


class Page(HTMLParser):
    """The elements and the texts in the cells of a page."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.cells, self.open = [], [""], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, sorted(name for name, _ in attributes)))
        self.open = tag in ("td", "pre", "th")
        self.cells.append("")

    def handle_data(self, data):
        self.cells[-1] += data


def page(directory, text, rows=ROWS):
    sample = {"step": 2, "chosen": "best", "reward": 0.5, "parts": {text: 1.0}}
    samples = [
        {**sample, "prompt": text, "completion": text},
        {**sample, "prompt": "", "completion": 99 * text},
    ]
    config = GrpoConfig(model=text, learning_rate=1e-5)
    report.write_report(directory, config, rows, samples)
    written = (directory / "report.html").read_text(encoding="utf-8")
    assert all(c == "\n" or c.isprintable() for c in written)
    return Page(written)


def test_hostile_text_is_text_on_the_page_and_nothing_is_fetched(tmp_path):
    rows = [*ROWS[:2], {**ROWS[2], f"reward/{HOSTILE}": 0.5, f"seconds_{HOSTILE}": 1.0}]
    ours = page(tmp_path, "harmless", [*ROWS[:2], {**ROWS[2], "seconds_evaluate": 1.0}])
    theirs = page(tmp_path, HOSTILE, rows)
    assert theirs.elements == ours.elements
    assert theirs.cells.count(SEEN) == 4  # prompt, completion, model in the facts and settings
    assert ("script" in dict(theirs.elements)) is False
    assert [names for tag, names in theirs.elements if tag == "img"] == [["alt", "src"]]
    written = (tmp_path / "report.html").read_text()
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in written
    assert "http:" not in written
    cells = theirs.cells
    assert cells[cells.index("learn") :][:4] == ["learn", "50.0", "82.0%", "2.00"]
    assert "0.875 (step 2)" in cells
    order = [cells.index(name) for name in ("learning_rate", "seed")]
    assert order == sorted(order)  # what was changed comes first
    assert any("more characters" in cell for cell in page(tmp_path, "y" * 30_000).cells)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [(1e308, -1e308), (3e38, -3e38), (float("nan"), float("inf"))])
def test_curves_are_drawn_with_any_values(tmp_path, monkeypatch, values):
    drawn, save = [], report.Figure.savefig
    monkeypatch.setattr(
        report.Figure, "savefig", lambda f, *a, **o: drawn.append(f) or save(f, *a, **o)
    )
    rows = [
        *ROWS,
        *({"step": 3 + i, "reward": value, "kl": value} for i, value in enumerate(values)),
    ]
    report.draw(rows, tmp_path / "curves.png")
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
    texts = [f"{i}{HOSTILE}" + 999 * "x" for i in range(30)]
    prompts = [Prompt({"prompt": text}, []) for text in texts]
    rewards = {"reward": torch.arange(30.0), f"part{HOSTILE}": torch.ones(30)}
    state, kept = random.getstate(), []
    for name in ("one", "two"):
        log(name)
        run = log(name + name)
        for step in (10, 15, 20):
            run.collect(step, prompts, texts, rewards)
            run.write({"step": step})
        lines = (run.directory / "samples.jsonl").read_bytes().splitlines()
        assert all(32 <= byte < 127 for line in lines for byte in line)
        kept.append([json.loads(line) for line in lines])
    assert random.getstate() == state
    assert kept[0] == kept[1] == run.samples
    assert [one["chosen"] for one in kept[0]] == ["best", "worst", "random"] * 2
    assert [one["completion"] for one in kept[0]][:2] == [texts[29], texts[0]]
    assert kept[0][2]["completion"] != kept[0][5]["completion"]
    said = capsys.readouterr().out
    assert said.replace("\n", "").isprintable()
    assert said.startswith(f"step 10 best 29 {printable('part' + HOSTILE)} 1: '29</pre>")
    assert max(map(len, said.splitlines())) < 450


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


def test_a_report_that_cannot_be_written_ends_no_run(log, capsys, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda *_: 1 / 0)
    log().finish(failed=False)
    assert "no report could be written: ZeroDivisionError" in capsys.readouterr().out


def tracked(directory, name, rows, said, **options):
    trackers = Trackers(GrpoConfig(track=(name,)), directory, "0123abcd", said.append)
    for row in rows:
        trackers.write(row)
    trackers.close(failed=False)


def test_tensorboard_has_every_step_once_also_after_a_cut(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracked(tmp_path, "tensorboard", ROWS, said := [])
    tracked(tmp_path, "tensorboard", [{"step": 2, "reward": 9.0}, {"step": 3, "reward": 1.0}], said)
    stored = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in stored.Scalars("reward")]
    assert (found, said) == ([(1, 0.5), (2, 9.0), (3, 1.0)], [])


def test_wandb_and_trackio_continue_their_run_and_a_failing_one_is_named_once(
    tmp_path, monkeypatch
):
    for name in ("wandb", "trackio"):
        begun, sent, ended, said = [], [], [], []

        def log(row, step, sent=sent):
            sent.append(step)
            random.random()
            if step == 2:
                raise OSError("no space left")

        run = SimpleNamespace(log=log, finish=lambda ended=ended, **o: ended.append(o))
        module = SimpleNamespace(
            init=lambda begun=begun, run=run, **o: begun.append(o) or run, Settings=dict
        )
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
        state = random.getstate()
        tracked(tmp_path, name, ROWS[:2], said)
        tracked(tmp_path, name, [ROWS[2], {"step": 3}], said)
        assert random.getstate() == state
        assert [sent, len(ended)] == [[0, 1, 2], 1]
        assert len(said) == 1
        assert said[0].startswith(f"track {name}: OSError: no space left; the run continues")
        assert begun[0] == begun[1]
        assert (begun[0]["project"], begun[0]["resume"]) == ("mine", "allow")
        assert begun[0]["name"] == f"{tmp_path.name}-0123"
        monkeypatch.setitem(sys.modules, name, None)
        tracked(tmp_path, name, ROWS, missing := [])
        assert missing[0].startswith(f"track {name}: ModuleNotFoundError")
        assert len(missing) == 1


def test_wandb_offline_records_each_row_and_no_secret(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    for name, value in (("MODE", "offline"), ("API_KEY", 40 * "e"), ("DIR", str(tmp_path))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    tracked(tmp_path, "wandb", ROWS, said := [])
    assert said == []
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    store, rows = DataStore(), []
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {
                (i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item
            }
            rows.append({name.lstrip("_"): value for name, value in items.items()})
    assert [{key: row[key] for key in one} for row, one in zip(rows, ROWS, strict=True)] == ROWS
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(40 * b"e" in path.read_bytes() for path in files)


def test_the_seconds_of_phases_add_up(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(measured.time, "perf_counter", lambda: now[0])
    phases = Phases(torch.device("cpu"))
    for seconds in (2.0, 3.0):
        with phases("generate"):
            now[0] += seconds
            with pytest.raises(KeyError), phases("score"):  # one inside interrupts
                now[0] += 10.0
                raise KeyError("reward")
            now[0] += 0.5
        now[0] += 50.0  # between the phases
    row = phases.read()
    assert (row["seconds_generate"], row["seconds_score"]) == (6.0, 20.0)
    assert phases.read() == {}
    monkeypatch.setattr(measured.Path, "write_text", lambda *_: open("/nothing"))
    monkeypatch.setattr(measured.Path, "read_text", lambda *_: open("/nothing"))
    with phases("learn"):
        now[0] += 2.0
    assert phases.read() == {"seconds_learn": 2.0}  # where no high-water mark is told


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no high-water mark")
def test_a_phase_shows_the_memory_that_it_allocates_and_no_other_does():
    phases = Phases(torch.device("cpu"))
    for megabytes in (0, 100, 0):
        with phases("generate"):
            torch.ones(megabytes * 250_000)
            with phases("score"):
                pass
        with phases("learn"):
            pass
    row = phases.read()
    for other in ("score", "learn"):
        assert 0.09 < row["peak_gb_generate"] - row[f"peak_gb_{other}"] < 0.15
