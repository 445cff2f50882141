"""A function that is called after a module has been imported."""

import importlib
import importlib.util
import pkgutil
import runpy
import sys

import pytest

from fastrl.integrations.importing import AfterImport

NAME = "watched_by_a_test"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Where the module is found; a watch that a test leaves behind ends with it."""
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop(NAME, None)


def load():
    sys.modules.pop(NAME, None)
    return importlib.import_module(NAME)


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
    assert watch.find_spec(NAME, None) is None  # an import in another thread may still ask


def test_without_names_nothing_is_watched():
    finders = list(sys.meta_path)
    AfterImport([], print)
    assert sys.meta_path == finders


def test_what_reads_a_module_without_importing_it(folder):
    seen = []
    AfterImport([NAME], seen.append)
    loader = importlib.util.find_spec(NAME).loader
    assert loader.get_source(NAME) == "value = 1\n"
    assert loader.path == str(folder / f"{NAME}.py")
    assert runpy.run_module(NAME)["value"] == 1
    assert seen == []
    assert pkgutil.get_data(NAME, f"{NAME}.py") == b"value = 1\n"


@pytest.mark.parametrize("registered", [True, False])
def test_a_module_that_is_executed_by_hand(registered):
    seen = []
    AfterImport([NAME], seen.append)
    spec = importlib.util.find_spec(NAME)
    module = importlib.util.module_from_spec(spec)
    if registered:
        sys.modules[NAME] = module
    spec.loader.exec_module(module)
    assert module.value == 1
    assert seen == ([NAME] if registered else [])


def test_finders_that_import_itself_skips():
    class Legacy:
        def find_module(self, name, path=None): ...

    sys.meta_path.insert(0, Legacy())
    seen = []
    AfterImport([NAME], seen.append)
    load()
    assert seen == [NAME]


def test_a_namespace_package_has_nothing_to_execute(folder):
    (folder / f"{NAME}.py").unlink()
    (folder / NAME).mkdir()
    importlib.invalidate_caches()
    AfterImport([NAME], print)
    assert list(load().__path__) == [str(folder / NAME)]


def test_two_watches_of_one_module():
    seen = []
    first, _ = (AfterImport([NAME], lambda _, n=n: seen.append(n)) for n in range(2))
    load()
    assert seen == [0, 1]
    first.stop()
    load()
    assert seen == [0, 1, 1]


def test_errors_of_the_import(folder):
    def refuse(name):
        raise NotImplementedError(name)

    AfterImport([NAME], refuse)
    with pytest.raises(NotImplementedError, match=NAME):
        load()
    assert NAME not in sys.modules
    (folder / f"{NAME}.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match=NAME):
        load()
