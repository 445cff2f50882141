"""The settings of a run of seconds; a model on disk; processes that start at once."""

import json
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def reported():
    """A run of `small` writes its report, which takes most of the time."""


@pytest.fixture
def small(request, tmp_path, monkeypatch):
    """Settings of a run of seconds: ten prompts, a reward for digits in the completion."""
    monkeypatch.chdir(tmp_path)
    if "reported" not in request.fixturenames:
        monkeypatch.setattr("fastrl.train.run_log.write_report", lambda *_: None)
    monkeypatch.setattr("tests.train.small_rewards.calls", 0)
    lines = [json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(10)]
    prompts = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    prompts[0].write_text("".join(lines[:6]))
    prompts[1].write_text("".join(lines[6:]))
    return {
        "out": str(tmp_path / "run"),
        "prompts": tuple(map(str, prompts)),
        "reward": ("tests.train.small_rewards:digits",),
        "prompts_per_step": 16,
        "max_new_tokens": 2,
        "steps": 3,
    }


@pytest.fixture
def own(monkeypatch):
    """Makes the functions of the module ``own``."""
    return lambda **functions: monkeypatch.setitem(sys.modules, "own", SimpleNamespace(**functions))


@pytest.fixture(scope="module")
def tiny():
    """A model whose policy is sharper than uniform, and its tokenizer."""
    from tests.train.packed import sharp

    return sharp()


@pytest.fixture
def base(tmp_path):
    """The directory of a model."""
    import torch

    from fastrl.train.loading import load

    torch.manual_seed(1)
    for part in load(None, torch.device("cpu")):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def teacher(tmp_path):
    """The directory of another model with the same tokens."""
    from tests.train.packed import save_teacher

    return save_teacher(tmp_path / "teacher")


@pytest.fixture
def forkserver(monkeypatch):
    """Processes are forked from one that has imported everything, but computed nothing."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.runs", "datasets", "pandas"])
    return context
