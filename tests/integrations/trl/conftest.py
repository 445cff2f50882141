"""The model that most tests of TRL's trainers train, and trainers that tests share."""

import functools

import pytest

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import make_trainer
from tests.integrations.trl.runs import save_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    needed("trl")
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def trainers(tiny_path, tmp_path_factory):
    """`make_trainer` without the model, which makes each trainer once."""
    out = tmp_path_factory.mktemp("out")
    return functools.cache(functools.partial(make_trainer, tiny_path, output_dir=out))
