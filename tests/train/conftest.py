"""The settings of a run of seconds."""

import sys

import pytest


@pytest.fixture
def small(tmp_path, monkeypatch):
    from tests.support.train_runs import small_settings

    monkeypatch.syspath_prepend(tmp_path)
    yield small_settings(tmp_path)
    sys.modules.pop("small_rewards", None)
