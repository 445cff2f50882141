"""report.html: complete, without a network or a script, and with every text as text."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.run import run_log
from fastrl.train.run.chart import chart
from fastrl.train.run.curves import draw
from fastrl.train.run.report import write_report
from fastrl.train.run.samples import Samples
from tests.support.train_runs import LOOPS, run

VOID = {"meta", "line", "circle", "polyline", "br"}


class Page(HTMLParser):
    """The elements and the texts of a page; fails if one is not closed in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self.open, self.cells = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "pre"):
            self.cells.append("")

    def handle_startendtag(self, tag, attributes):
        assert tag in VOID
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if {"td", "pre"} & set(self.open):
            self.cells[-1] += data

    def tags(self):
        return {tag for tag, _ in self.elements}


HOSTILE = [
    "</pre></td></table><script>alert(1)</script><img src=x onerror=alert(1)>",
    "<style>body { display: none }</style><!-- --> <svg onload=alert(1)>",
    "\"'`&amp;&#60;b&#62; {{ 7 * 7 }} {% raise %}",
    "\x00\x1b[2J\x1b]0;t\x07\x9b31m\u202egnp\ud800 tab\tline\nend",
]
SEEN = [*HOSTILE[:3], r"\x00\x1b[2J\x1b]0;t\x07\x9b31m\u202egnp\ud800" + " tab\tline\nend"]
ROWS = [
    {"step": 0, "held_out_reward": 0.125, "seconds_start": 10.0, "seconds_evaluate": 5.0},
    *(
        {
            "step": step,
            "reward": step / 10,
            "kl_old": 0.0,
            "tokens": 100.0,
            "tokens_per_second": 10.0,
            "seconds_generate": 6.0,
            "seconds_learn": 3.0,
            "peak_gb_learn": float(step),
            "grad_norm": 1.5,
        }
        for step in (1, 2, 3, 4, 5)
    ),
    {"step": 6, "held_out_reward": 0.875},
]


@pytest.fixture
def page(tmp_path):
    """Writes a report, and returns its text and the page."""

    def make(rows=ROWS, config=None, completions=(), parts=None):
        config = config or GrpoConfig()
        samples = Samples(config, tmp_path, lambda line: None)
        for step, text in enumerate(completions, 1):
            rewards = {"reward": [0.5], **{name: [1.0] for name in parts or ()}}
            samples.collect([text], [text], rewards)
            samples.write(step)
        path = tmp_path / "report.html"
        write_report(path, "grpo", config, rows, samples)
        text = path.read_text(encoding="utf-8")
        return text, Page(text)

    return make


def test_hostile_text_is_text_wherever_it_comes_from(page):
    ours = page(completions=["a"] * len(HOSTILE), parts=["format"])[1]
    rows = [dict(row) for row in ROWS]
    for i, text in enumerate(HOSTILE):
        rows[2] |= {f"reward/{text}": 0.5, f"{i}{text}": 1.0}
    config = GrpoConfig(model="".join(HOSTILE), wandb_project="<b>project</b>")
    text, theirs = page(rows, config, HOSTILE, parts=HOSTILE)
    assert theirs.tags() == ours.tags()
    assert not {"script", "img"} & theirs.tags()
    attributes = {name for _, some in theirs.elements for name in some}
    assert attributes == {name for _, some in ours.elements for name in some}
    for seen in SEEN:
        assert theirs.cells.count(seen) == 2  # prompt and completion
    assert "".join(SEEN) in theirs.cells  # the model
    assert "<b>project</b>" in theirs.cells
    assert all(c in "\n\t" or c.isprintable() for c in text)


def test_the_page_needs_no_network_and_forbids_scripts(page):
    text, parsed = page(completions=["x"])
    policy = [a["content"] for tag, a in parsed.elements if "http-equiv" in a and tag == "meta"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    for _, attributes in parsed.elements:
        assert not {"src", "href", "srcset", "xlink:href", "data", "action"} & attributes.keys()
    assert "url(" not in text
    assert "@import" not in text
    assert "http:" not in text.replace("http-equiv", "")
    assert "https:" not in text
    assert "prefers-color-scheme: dark" in text


def test_a_text_of_a_megabyte_is_cut_and_says_how_much(page):
    text, parsed = page(completions=["y" * 1_000_000])
    assert len(text) < 200_000
    assert "y" * 20_000 + " ... 980,000 more characters" in parsed.cells


def test_changed_settings_come_first_and_others_follow(page):
    config = PpoConfig(learning_rate=1e-5, lora_rank=8, steps=6)
    _, parsed = page(config=config)
    text = " ".join(" ".join(parsed.texts).split())
    order = [text.index(f"{name} {value} ") for name, value in config_of(config)]
    assert max(order[:3]) < min(order[3:])
    assert config_of(config)[0] == ("steps", "6")
    scale = [row for row in zip(parsed.cells, parsed.cells[1:], strict=False) if row[0] == "scale"]
    assert scale == []
    _, parsed = page(config=GrpoConfig())
    changed = [tag for tag, attributes in parsed.elements if attributes.get("class") == "changed"]
    assert changed == []  # neither is what another default implies


def config_of(config):
    changed = [("steps", "6"), ("learning_rate", "1e-05"), ("lora_rank", "8")]
    return [*changed, ("seed", "0"), ("gamma", "1.0"), ("name", "null"), ("out_dir", "runs")]


def test_the_page_says_where_time_and_memory_went(page):
    _, parsed = page()
    cells = parsed.cells
    table = cells[cells.index("generate") : cells.index("generate") + 25]
    # 65 s: 10 of the start, 5 of the evaluation, 5 steps of 10 s with 1 s outside of the phases
    assert table[:5] == ["generate", "30.0", "46.2%", "", ""]
    assert table[5:10] == ["learn", "15.0", "23.1%", "", "5.00 GB"]
    assert table[10:15] == ["start", "10.0", "15.4%", "", ""]
    assert [table[15][:8], table[20][:8]] == ["evaluate", "other"]
    assert "0:01:05" in cells
    assert "0.125" in cells
    assert "0.875 (step 6)" in cells


def test_every_quantity_of_the_log_has_a_curve(page):
    text, _ = page()
    for title in ("reward", "KL", "seconds per phase", "grad_norm", "tokens per second"):
        assert f"<figcaption>{title}</figcaption>" in text
    assert "seconds_start" not in text


def test_a_chart_places_values_in_its_frame_and_leaves_out_what_is_not_finite():
    rows = [{"step": i, "a": float(i)} for i in range(5)]
    drawn = chart("t", ["a", "b"], [*rows, {"step": 5, "a": float("nan")}])
    (curve,) = drawn.curves
    assert curve.path.split() == [
        f"{44 + 67 * i:.1f},{160 - 38 * i:.1f}" for i in (0, 1, 2, 3, 4, 4)
    ]
    assert (curve.last, len(curve.marks)) == ("4", 5)
    assert [tick.text for tick in drawn.x_ticks] == ["0", "1", "2", "3", "4"]
    constant = chart("t", ["a"], [{"step": 3, "a": 7.0}])
    assert constant.curves[0].marks == [(178.0, 84.0)]
    assert chart("t", ["b"], rows).curves == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [(1e308, -1e308), (1.7e308, 1.7e308), (3e38, -3e38)])
def test_values_that_no_axis_can_span_cost_neither_report_nor_curves(values, page, tmp_path):
    rows = [*ROWS, *({"step": 7 + i, "reward": value} for i, value in enumerate(values))]
    text, _ = page(rows=rows)
    assert "<figcaption>reward</figcaption>" in text
    draw(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_long_run_is_thinned_but_ends_where_it_ended():
    drawn = chart("t", ["a"], [{"step": i, "a": float(i % 7)} for i in range(100_003)])
    points = drawn.curves[0].path.split()
    assert len(points) <= 602
    assert points[-1].startswith("312.0,")
    assert drawn.curves[0].marks == []


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_leaves_a_report_and_names_it(small, loop):
    summary = run(loop, small, name="a", sample_every=1, track=())
    path = summary.directory / "report.html"
    assert f"report: {path}" in str(summary).splitlines()
    parsed = Page(path.read_text())
    samples = map(json.loads, (summary.directory / "samples.jsonl").read_text().splitlines())
    for sample in samples:
        assert sample["completion"] in parsed.cells
    assert "3 of 3" in parsed.cells
    assert {"generate", "score", "learn", "evaluate", "start"} <= set(parsed.cells)


def test_there_is_a_report_at_each_checkpoint(small, monkeypatch):
    seen = []
    original = run_log.write_report

    def spied(path, loop, config, rows, samples):
        original(path, loop, config, rows, samples)
        seen.append(rows[-1]["step"])

    monkeypatch.setattr(run_log, "write_report", spied)
    run("grpo", small, steps=4, save_every=2)
    assert seen == [2, 4, 4]


def test_a_report_that_cannot_be_written_ends_no_run_and_hides_no_error(small, monkeypatch, capsys):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(run_log, "write_report", full)
    assert run("grpo", small, name="a", save_every=1).step == 3
    assert "report.html could not be written: OSError: no space left" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"must be finite.*; --resume continues from"):
        run("grpo", small, name="b", reward="small_rewards:fails_later", steps=20)


def test_a_report_is_replaced_as_a_whole(page, tmp_path, monkeypatch):
    before, _ = page()

    def fails(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match=r"report.html could not be written: No space left"):
        page(rows=ROWS[:2])
    assert (tmp_path / "report.html").read_text() == before
    assert [path.name for path in Path(tmp_path).iterdir()] == ["report.html"]
