import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """A function that imports a file of the folders of bench."""
    for folder in ("gpu_cost", "documents", "studies"):
        monkeypatch.syspath_prepend(str(BENCH / folder))
    return importlib.import_module
