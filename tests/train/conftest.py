"""The settings of a run of seconds; a model on disk."""

import multiprocessing
import sys
from pathlib import Path

import pytest


@pytest.fixture
def small(tmp_path, monkeypatch):
    from tests.support.train_runs import small_settings

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield small_settings(tmp_path)
    sys.modules.pop("small_rewards", None)


@pytest.fixture
def unreported(monkeypatch):
    """No report is written, which takes most of the time of a short run."""
    monkeypatch.setattr("fastrl.train.run_log.write_report", lambda *_: None)


@pytest.fixture
def base(tmp_path):
    """The directory of a model."""
    import torch

    from fastrl.train.loading import load

    torch.manual_seed(1)
    model, tokenizer = load(None, torch.device("cpu"))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def forkserver(monkeypatch):
    """Processes are forked from one that has imported everything, but computed nothing."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.train_runs", "datasets", "pandas"])
    return context
