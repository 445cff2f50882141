"""The model that most tests of TRL's trainers train."""

import pytest

from tests.integrations.packages import needed
from tests.integrations.trl.runs import save_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    needed("trl")
    return save_model(tmp_path_factory.mktemp("tiny"))
