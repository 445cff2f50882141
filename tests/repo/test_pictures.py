"""What is made of the committed results: pictures, numbers of documents, the files themselves."""

import json
import re

import pytest

NAMES = ("curves", "memory", "score-centering", "step", "time")


def shown(path):
    """What a picture shows: its numbers and its words, but not where matplotlib puts them."""
    text = path.read_text()
    numbers = re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)[1]
    return numbers, sorted(re.findall(r"<text[^>]*>([^<]*)</text>", text))


@pytest.fixture
def pictures(bench):
    pytest.importorskip("matplotlib")
    return bench("pictures")


@pytest.fixture
def results(bench):
    return bench("results")


def test_the_files_of_results_have_a_case_or_a_run_in_a_line(results):
    paths = list(results.RESULTS.glob("*.json"))
    assert len(paths) > 10
    for path in paths:
        text = path.read_text()
        assert text == results.written(json.loads(text)), path.name
    (cases,) = (path.read_text() for path in paths if "logprobs-rows" in path.name)
    assert cases.count('\n  {"name": ') == 4


def test_pictures_are_drawn_from_the_committed_results(pictures, tmp_path):
    """To the byte, where the same matplotlib draws them."""
    drawn = pictures.drawn(tmp_path)
    committed = [path for name in NAMES for path in pictures.PICTURES.glob(f"{name}-*.svg")]
    assert {path.name for path in drawn} == {path.name for path in committed}
    assert {"curves-light.svg", "curves-dark.svg"} <= {path.name for path in drawn}
    for path in drawn:
        kept = pictures.PICTURES / path.name
        assert shown(path) == shown(kept), f"`make pictures` draws {path.name} again"
        versions = [re.search(r"Matplotlib v[\d.]+", one.read_text())[0] for one in (path, kept)]
        if versions[0] == versions[1]:
            assert path.read_bytes() == kept.read_bytes(), path.name


def test_a_stale_picture_is_found(pictures, results, tmp_path, monkeypatch):
    found = results.read("curves")
    next(iter(found["methods"]["curves"].values()))["2"]["held_out_reward"][3][1] += 0.001
    (tmp_path / "curves.json").write_text(json.dumps(found))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    changed, _ = pictures.drawn(tmp_path)
    assert shown(changed) != shown(pictures.PICTURES / "curves-light.svg")


def test_the_numbers_of_the_readme_are_the_results(pictures, results):
    readme = (results.ROOT / "README.md").read_text()
    assert re.search("<!-- numbers:begin -->.*<!-- numbers:end -->", readme, re.DOTALL)
    assert readme == pictures.in_readme(readme, results.read("cpu")), "`make pictures` writes them"


def test_the_rewards_of_the_training_page_are_the_results(results, bench):
    study = results.read("curves")["methods"]
    page = " ".join((results.ROOT / "docs" / "training.md").read_text().split())

    def spread(seeds, row):
        return bench("curves").spread([one["held_out_reward"][row][1] for one in seeds.values()])

    for method, seeds in study["curves"].items():
        assert f"began at {spread(seeds, 0)}" in page
        assert f"{spread(seeds, -1)} with {method}" in page
    assert f"a teacher that has {study['teacher']['held_out_reward'][-1][1]:.2f}" in page


def provider(name, kind, ms, peak=None):
    times = {str(turn): ms / 1e3 for turn in range(3)} if ms else {}
    row = {"name": name, "kind": kind, "seconds": times, "peak": peak, "error": 2e-3}
    return {**row, "failure": "" if ms else "it is broken"}


def test_the_tables_have_the_numbers_of_the_results(bench):
    numbers = bench("readme_numbers")
    providers = [
        provider("fastrl cpu", "fastrl", 2, 5_000_000),
        provider("fastrl cpu, in place", "fastrl in place", 1, 0),
        provider("eager", "eager", 30, 70_000_000),
        provider("eager in bfloat16", "eager", 20, 90_000_000),
        provider("torch.compile", "compile", 1, 70_000_000),
        provider("TRL", "peer", 5),
        provider("Liger", "peer", None),
        provider("copy", "floor", 1, 0),
    ]
    cases = []
    for work, dtype in numbers.MEASURED:
        op, step, rows, vocabulary = numbers.WORK[work]
        case = {"op": op, "step": step, "dtype": dtype, "variant": "", "providers": providers}
        cases.append({**case, "shape": {"rows": rows, "vocabulary": vocabulary}})
    memory = {**cases[-2], "shape": {"rows": 4096, "vocabulary": 49152}}
    made = {"machine": {"device": "a CPU", "torch": "2.13.0"}, "date": "2026-11-26T01:02:03"}
    before = "a <!-- numbers:begin -->\nstale numbers\n<!-- numbers:end --> b"
    text = numbers.in_readme(before, {**made, "cases": [*cases, memory]})
    begin = "a <!-- numbers:begin -->\n\nMeasured on a CPU; torch 2.13.0, 2026-11-26."
    assert text.startswith(begin)
    assert text.endswith("<!-- numbers:end --> b")
    assert text.count("torch.compile is faster for *") == len(cases)
    assert "error of 0.2% of the largest gradient (fastrl: 0.20%)" in " ".join(text.split())
    for line in (
        "| loss and gradient from logits | 256 x 151936 | float32 | 2 ms | 0.5x | **0.5x** | 10x "
        "| TRL, 2.5x |",
        "tokens x vocabulary | fastrl cpu | fastrl cpu, in place | eager | eager in bfloat16 "
        "| torch.compile |",
        "| 4096 x 49152 | 5 | 0 | 70 | 90 | 70 |",
    ):
        assert line in text
    assert "stale numbers" not in text
    assert "| 1024 x 49152 | 5" not in text
    with pytest.raises(ValueError, match="markers"):
        numbers.in_readme("no tables", {**made, "cases": cases})
    with pytest.raises(ValueError, match="token_logprobs"):
        numbers.in_readme(before, {**made, "cases": cases[1:]})
