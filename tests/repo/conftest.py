import importlib
from pathlib import Path

import pytest


@pytest.fixture
def bench(monkeypatch):
    """A function that imports a file of bench."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module
