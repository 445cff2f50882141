"""A function that is called after a module has been imported."""

import importlib
import sys

import pytest

from fastrl.integrations.importing import AfterImport

NAME = "watched_by_a_test"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop(NAME, None)


def load():
    sys.modules.pop(NAME, None)
    return importlib.import_module(NAME)


@pytest.mark.usefixtures("folder")
def test_the_module_is_complete_and_keeps_its_loader():
    seen, own = [], load()
    watch = AfterImport([NAME], lambda name: seen.append((name, sys.modules[name].value)))
    module = load()
    assert seen == [(NAME, 1)]
    assert type(module.__spec__.loader) is type(module.__loader__) is type(own.__loader__)
    watch.stop()
    watch.stop()
    load()
    assert len(seen) == 1
    assert watch not in sys.meta_path


@pytest.mark.usefixtures("folder")
def test_two_watches_of_one_module():
    seen = []
    first, second = (AfterImport([NAME], lambda _, n=n: seen.append(n)) for n in range(2))
    load()
    assert seen == [0, 1]
    first.stop()
    load()
    assert seen == [0, 1, 1]
    second.stop()


def test_a_missing_module_is_missing():
    watch = AfterImport([NAME], lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=NAME):
        importlib.import_module(NAME)
    watch.stop()


@pytest.mark.usefixtures("folder")
def test_an_error_of_the_function_is_one_of_the_import():
    def refuse(name):
        raise NotImplementedError(name)

    watch = AfterImport([NAME], refuse)
    with pytest.raises(NotImplementedError, match=NAME):
        load()
    watch.stop()
    assert NAME not in sys.modules
