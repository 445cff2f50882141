"""What a person sees of a step: seconds and memory per phase, the bar, the panels."""

import sys

import matplotlib.figure
import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.run import phases as measured
from fastrl.train.run.curves import draw
from fastrl.train.run.phases import Phases
from fastrl.train.run.progress import on_bar

CPU = torch.device("cpu")

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="no high-water mark of memory")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances; `clock[0]` is the time."""
    now = [100.0]
    monkeypatch.setattr(measured.time, "perf_counter", lambda: now[0])
    return now


def hundred_megabytes():
    return torch.ones(25_000_000)


@only_linux
def test_a_phase_shows_what_it_allocates_and_no_other_phase_does():
    phases = Phases(CPU)
    with phases("score"):
        pass
    with phases("learn"):
        hundred_megabytes()
    with phases("generate"):
        pass
    row = phases.read()
    assert 0.09 < row["peak_gb_learn"] - row["peak_gb_score"] < 0.15
    assert row["peak_gb_learn"] - row["peak_gb_generate"] > 0.09


@only_linux
def test_memory_that_stays_in_use_counts_in_every_phase():
    phases = Phases(CPU)
    with phases("score"):
        pass
    weights = hundred_megabytes()
    with phases("learn"):
        pass
    row = phases.read()
    assert 0.09 < row["peak_gb_learn"] - row["peak_gb_score"] < 0.15
    del weights


@only_linux
def test_a_repeated_phase_has_its_largest_peak():
    phases = Phases(CPU)
    for megabytes in (0, 100, 0):
        with phases("generate"):
            torch.ones(megabytes * 250_000)
        with phases("learn"):
            pass
    row = phases.read()
    assert 0.09 < row["peak_gb_generate"] - row["peak_gb_learn"] < 0.15


def test_the_seconds_of_a_repeated_phase_add_up(clock):
    phases = Phases(CPU)
    for seconds in (2.0, 3.0):
        with phases("generate"):
            clock[0] += seconds
        clock[0] += 50.0  # between the phases
        with phases("score"):
            clock[0] += 1.0
    row = phases.read()
    assert (row["seconds_generate"], row["seconds_score"]) == (5.0, 2.0)


def test_a_phase_inside_another_interrupts_it(clock):
    phases = Phases(CPU)
    with phases("generate"):
        clock[0] += 1.0
        with phases("score"):
            clock[0] += 10.0
            with phases("generate"):
                clock[0] += 0.25
            clock[0] += 20.0
        clock[0] += 2.0
    row = phases.read()
    assert (row["seconds_generate"], row["seconds_score"]) == (3.25, 30.0)


@only_linux
def test_an_inner_phase_does_not_take_the_peak_of_the_outer_one():
    phases = Phases(CPU)
    with phases("generate"):
        hundred_megabytes()
        with phases("score"):
            pass
    row = phases.read()
    assert row["peak_gb_generate"] - row["peak_gb_score"] > 0.09


def test_reading_begins_anew(clock):
    phases = Phases(CPU)
    with phases("generate"):
        clock[0] += 1.0
    assert phases.read()["seconds_generate"] == 1.0
    assert phases.read() == {}
    with phases("learn"):
        clock[0] += 4.0
    row = phases.read()
    assert row["seconds_learn"] == 4.0
    assert {key.rpartition("_")[2] for key in row} == {"learn"}


def test_a_phase_that_raises_is_over(clock):
    def reward():
        clock[0] += 1.0
        raise KeyError("reward")

    phases = Phases(CPU)
    with pytest.raises(KeyError), phases("score"):
        reward()
    clock[0] += 7.0
    with phases("learn"):
        clock[0] += 2.0
    row = phases.read()
    assert (row["seconds_score"], row["seconds_learn"]) == (1.0, 2.0)


def test_without_a_high_water_mark_there_are_only_seconds(clock, monkeypatch):
    def refuse(*_):
        raise PermissionError("clear_refs")

    monkeypatch.setattr(measured.Path, "write_text", refuse)
    phases = Phases(CPU)
    with phases("learn"):
        clock[0] += 2.0
    assert phases.read() == {"seconds_learn": 2.0}


ROW = {
    "step": 7,
    "reward": 0.5125,
    "informative": 0.75,
    "kl": 0.000123456,
    "kl_old": 0.0001,
    "kl_sampler": 0.0002,
    "entropy": 1.234567,
    "clip_fraction": 0.12345,
    "length": 3.2,
    "truncated": 0.25,
    "left_out": 0.5,
    "real_tokens": 1000.0,
    "padded_tokens": 1100.0,
    "tokens_per_second": 21345.678,
    "held_out_reward": 0.91015625,
    "seconds_generate": 6.0,
    "seconds_score": 0.5,
    "seconds_logprobs": 1.0,
    "seconds_learn": 2.5,
    "peak_gb_generate": 12.3456,
    "peak_gb_learn": 23.4567,
}


def test_the_bar_names_the_longest_phase_and_the_largest_peak():
    shown = on_bar(ROW)
    assert shown == {
        "reward": "0.512",
        "held_out": "0.91",
        "kl": "0.00012",
        "entropy": "1.2",
        "clip": "0.12",
        "tok/s": "21346",
        "generate": "60%",
        "GB": "23.5",
    }
    assert len(", ".join(f"{name}={value}" for name, value in shown.items())) <= 100


def test_the_bar_shows_the_kl_that_is_there():
    assert "kl_old" not in on_bar(ROW)
    without = {key: value for key, value in ROW.items() if key != "kl"}
    assert on_bar(without)["kl_old"] == "0.0001"
    assert on_bar({"step": 0, "held_out_reward": 0.1}) == {"held_out": "0.1"}


def test_what_is_logged_has_its_panel(tmp_path, monkeypatch):
    drawn = []
    save = matplotlib.figure.Figure.savefig

    def spied(figure, *args, **options):
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", spied)
    draw([{"step": 0, "held_out_reward": 0.1}, ROW], tmp_path / "curves.png")
    panels = {axes.get_title(): [line.get_label() for line in axes.lines] for axes in drawn[0].axes}
    assert panels["seconds per phase"] == ["generate", "score", "logprobs", "learn"]
    assert panels["peak memory per phase, GB"] == ["generate", "learn"]
    assert panels["KL"] == ["to the reference", "to the sampling policy", "sampler to trainer"]
    assert panels["tokens in the model"] == ["real", "with padding"]
    assert panels["share of completions"] == ["truncated", "left out"]
    assert panels["tokens per second"] == ["tokens_per_second"]
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
