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


def test_the_tables_of_the_readme_follow_the_results(results, bench):
    numbers, found = bench("readme_numbers"), results.read("cpu")
    case = numbers.measured(found, "log-probability", "float32")
    ms = {"fastrl": 2, "compile": 1, "eager": 30, "peer": 5, "floor": 1}
    for row in case["providers"]:
        row["seconds"] = {str(turn): ms[row["kind"]] / 1e3 for turn in range(3)}
        row["error"] = 0.002
    absent = {**row, "kind": "peer", "name": "Liger", "seconds": {}, "peak": None}
    case["providers"].append(absent)
    size = {"op": "linear_policy_loss", "dtype": "float32", "vocabulary": 49152}
    (memory,) = numbers.matching(found, **size, rows=4096)
    for row in memory["providers"]:
        row["peak"] = 70_000_000
    memory["providers"].append(absent)
    found |= {"machine": {"device": "a CPU", "torch": "2.13.0"}, "date": "2026-11-26T01:02:03"}
    before = "a <!-- numbers:begin -->\nstale numbers\n<!-- numbers:end --> b"
    text = numbers.in_readme(before, found)
    begin = "a <!-- numbers:begin -->\n\nMeasured on a CPU; torch 2.13.0, 2026-11-26."
    assert text.startswith(begin)
    assert text.endswith("<!-- numbers:end --> b")
    assert not re.search(r"stale numbers|Liger|\| (copy|bare GEMMs) ", text)
    assert "| float32 | 2 ms |  | **0.5x** | 15x | TRL selective_log_softmax, 2.5x |" in text
    assert "torch.compile is faster for *log-probability* in float32" in " ".join(text.split())
    assert "error of 0.2% of the largest gradient (fastrl: 0.20%)" in " ".join(text.split())
    assert re.search(r"^\| 4096 x 49152 (\| 70 )+\|", text, re.MULTILINE)
    assert numbers.matching(found, **size, rows=1024)
    assert not re.search(r"^\| 1024 x 49152", text, re.MULTILINE)
    with pytest.raises(ValueError, match="markers"):
        numbers.in_readme("no tables", found)
    case["step"] = "backward"
    with pytest.raises(ValueError, match="token_logprobs"):
        numbers.in_readme(before, found)
