"""Pictures of results: what they show is what the JSON says, and equal JSON gives equal files."""

import copy
import json
import re
import sys

import pytest

pytest.importorskip("matplotlib")

from fastrl.bench import plots
from fastrl.bench.figures import LOOKS, look

MACHINE = {"device": "a CPU", "torch": "2.13.0", "fastrl": "0.1.0"}
FASTRL, LOST = 2.0, 1.0  # ms of 64 rows; a compiled form is faster than fastrl


def provider(name, kind, ms, *, rows=64, peak=2e6, failure=""):
    seconds = {str(turn): ms / 1e3 * rows / 64 for turn in range(3)} if ms else {}
    known = {"name": name, "kind": kind, "seconds": seconds, "failure": failure}
    known["error"] = None if kind == "floor" or failure else 1e-6
    return known | {"peak": None if failure else int(peak * rows / 64)}


def case(rows=64, vocabulary=1000, op="linear_policy_loss"):
    shape = {"rows": rows, "hidden": 16, "vocabulary": vocabulary}
    rows_of = [
        provider("fastrl cpu", "fastrl", FASTRL, rows=rows),
        provider("fastrl cpu in place", "fastrl in place", 1.5, rows=rows),
        provider("eager", "eager", 9, rows=rows, peak=9e6),
        provider("torch.compile", "compile", LOST, rows=rows, peak=5e6),
        provider("Liger", "peer", None, failure="RuntimeError: needs a GPU"),
        provider("an unknown peer", "peer", 3, rows=rows),
        provider("GEMMs", "floor", 1, rows=rows),
    ]
    same = {"op": op, "step": "both", "model": "tiny", "dtype": "float32", "variant": ""}
    return {"name": f"{op} {rows} x {vocabulary}", **same, "shape": shape, "providers": rows_of}


@pytest.fixture
def results():
    sizes = [(64, 1000), (256, 1000), (1024, 1000), (64, 8000), (64, 9000)]
    return {"machine": MACHINE, "cases": [case(*size) for size in sizes]}


@pytest.fixture
def a_step():
    parts = [
        {"part": name, "seconds": 1.5, "low": 1, "high": 2, "peak": peak}
        for name, peak in (("generation", 1e6), ("loss", 3e9), ("optimizer", None))
    ]
    ours = {"name": "with fastrl", "failure": "", "parts": parts}
    failed = {"name": "without", "failure": "loss: out of memory", "parts": parts[:1]}
    return {"machine": MACHINE, "model": "small", "variants": [ours, failed]}


def numbers(path):
    return re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.DOTALL)[1]


def test_equal_results_are_equal_files_and_pages_differ_in_colours_alone(results, a_step, tmp_path):
    for content in (results, a_step):
        first = plots.draw(content, tmp_path / "first")
        second = plots.draw(json.loads(json.dumps(content)), tmp_path / "second")
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
        for light, dark in zip(first[::2], first[1::2], strict=True):
            assert light.name.replace("light", "dark") == dark.name
            assert light.read_text() != dark.read_text()
            hidden = [re.sub("#[0-9a-f]{6}", "#", path.read_text()) for path in (light, dark)]
            assert hidden[0] == hidden[1]
            assert "sans-serif" in hidden[0]
            assert "<text" in hidden[0]
            assert "<dc:date>" not in hidden[0]


def test_every_number_that_changes_changes_the_picture(results, tmp_path):
    before = {path.name: numbers(path) for path in plots.draw(results, tmp_path)}
    assert [*before][::2] == [f"{name}-light.svg" for name in ("overview", "time", "memory")]
    # also where fastrl is slower
    assert f"torch.compile: {LOST / FASTRL:.4g}: 0" in before["overview-light.svg"]
    assert "torch.compile: 64: 0.001" in before["time-light.svg"]
    assert "fastrl cpu: 64: 0.002, 256: 0.008, 1024: 0.032" in before["time-light.svg"]
    assert "eager: 64: 9e+06, 256: 3.6e+07, 1024: 1.44e+08" in before["memory-dark.svg"]
    for name, change in (("seconds", {"0": 7.0, "1": 7.0, "2": 7.0}), ("peak", 70_000_000)):
        changed = copy.deepcopy(results)
        changed["cases"][1]["providers"][0][name] = change
        after = {path.name: numbers(path) for path in plots.draw(changed, tmp_path)}
        picture = {"seconds": "time", "peak": "memory"}[name]
        assert {one for one in after if after[one] != before[one]} >= {f"{picture}-light.svg"}


def test_rows_and_models_make_lines(results):
    (x, rows), (_, models) = plots.sweeps(results["cases"])
    assert [x(one) for one in rows] == [64, 256, 1024]
    assert [plots.vocabulary(one) for one in models] == [1000, 8000, 9000]
    assert plots.sweeps(results["cases"][:2]) == []  # no line through two points
    for row in results["cases"][1]["providers"]:
        row["seconds"] = {}
    ((x, _),) = plots.sweeps(results["cases"])
    assert x is plots.vocabulary
    alone = case()
    alone["shape"] = {"prompts": 4, "group_size": 8}
    assert plots.tokens(alone) == 32


def test_fastrl_and_peers_keep_their_colours():
    assert look("fastrl triton", "fastrl") == look("x", "fastrl in place")
    assert look("TRL, chunked", "peer") == LOOKS["trl"]
    assert look("unheard of", "peer")[0] not in {colour for colour, _ in LOOKS.values()}
    colours = [colour for colour, _ in LOOKS.values()]
    assert len(set(colours)) == len(colours)
    for colour in colours:  # legible on white and on GitHub's dark page
        assert contrast(colour, "#ffffff") > 3
        assert contrast(colour, "#0d1117") > 3


def contrast(first, second):
    """The ratio of WCAG 2."""
    lights = []
    for colour in (first, second):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        lights.append(sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_a_step_is_bars_and_says_what_failed(a_step, tmp_path):
    light, _ = plots.draw(a_step, tmp_path)
    assert "loss: 1.5-3" in numbers(light)
    assert "with fastrl: 0-1e+06, 0-3e+09, 0-0" in numbers(light)
    for said in ("loss: out of memory", "3 GB", "4.5 s"):
        assert said in light.read_text()


def test_what_is_unknown_is_not_drawn(results, tmp_path):
    nothing = case()
    nothing["providers"] = [provider("fastrl cpu", "fastrl", None, failure="it failed")]
    assert len(plots.draw({"machine": MACHINE, "cases": [nothing]}, tmp_path)) == 2
    assert plots.draw({"machine": MACHINE, "cases": []}, tmp_path) == []
    for one in results["cases"]:
        for row in one["providers"]:
            row["peak"] = None
    plots.draw(results, tmp_path)
    assert ": 64:" not in numbers(tmp_path / "memory-light.svg")


def test_the_command_draws_or_says_why_not(results, tmp_path, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    assert plots.main([str(path), "--out", str(tmp_path / "plots")]) == 0
    assert (tmp_path / "plots" / "overview-dark.svg").exists()
    for text, said in (("{}", "results must be those"), ("{", "results.json"), ("[]", "must be")):
        path.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            plots.main([str(path)])
        assert said in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"fastrl-kernels\[bench\]"):
        plots.draw(results, tmp_path)
