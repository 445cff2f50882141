"""The model that most tests of TRL's trainers train, and trainers that tests share."""

import functools
from pathlib import Path

import pytest

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import make_trainer
from tests.integrations.trl.runs import save_model


def pytest_collection_modifyitems(items):
    """Warnings of TRL's trainers, and of fastrl's about them, stop no test."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Trainers write to a directory of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    needed("trl")
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def gpt2_path(tmp_path_factory):
    """Positions are absolute, and TRL pads on the left."""
    needed("trl")
    options = {"n_positions": 32, "n_layer": 1, "n_head": 2}
    options |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return save_model(tmp_path_factory.mktemp("gpt2"), "GPT2Config", **options)


@pytest.fixture(scope="module")
def trainers(tiny_path, tmp_path_factory):
    """`make_trainer` without the model, which makes each trainer once."""
    out = tmp_path_factory.mktemp("out")
    return functools.cache(functools.partial(make_trainer, tiny_path, output_dir=out))
