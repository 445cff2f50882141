"""Which adapter a trainer of TRL gets: its class decides, with the methods that must be TRL's."""

import importlib
import types

import pytest

from tests.integrations.packages import needed
from tests.integrations.trl.distilling import make_distillation

trl = needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.handle import with_globals  # noqa: E402
from fastrl.integrations.trl.trainers import TRAINERS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def trainer(tiny_path, tmp_path_factory):
    return make_distillation(tiny_path, output_dir=tmp_path_factory.mktemp("out"))


@pytest.mark.parametrize("row", TRAINERS, ids=lambda row: row.name)
def test_every_class_is_where_the_table_says(row):
    base = getattr(importlib.import_module(row.module), row.name)
    assert base.__module__ == row.module
    assert all(callable(getattr(base, method)) for method in row.methods)


def server():
    return importlib.import_module("trl.experimental.server_distillation").ServerDistillationTrainer


def renamed():
    """The class of the deprecated import, whose instances have no hash."""
    return importlib.import_module("trl.experimental.distillation").DistillationTrainer


def with_own(**methods):
    return lambda: type("MyTrainer", (trl.DistillationTrainer,), methods)


REFUSED = {
    "TRL's subclass": (
        server,
        r"ServerDistillationTrainer overrides DistillationTrainer\..*Teacher\.from_top_k",
    ),
    "a subclass with a loss": (
        with_own(_compute_loss=lambda self, *_: None),
        r"MyTrainer overrides DistillationTrainer\._compute_loss, which",
    ),
    "a subclass around the loss": (
        with_own(compute_loss=lambda self, *_: None),
        r"MyTrainer overrides DistillationTrainer\.compute_loss, which",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_subclass_with_another_loss_is_refused(name, trainer, monkeypatch):
    kind, sentence = REFUSED[name]
    monkeypatch.setattr(trainer, "__class__", kind())
    before = dict(trainer.__dict__)
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer)
    assert trainer.__dict__ == before


@pytest.mark.parametrize("kind", [renamed, with_own(log=print)], ids=["deprecated", "own"])
def test_a_subclass_with_the_same_loss_is_accepted(kind, trainer, monkeypatch):
    monkeypatch.setattr(trainer, "__class__", kind())
    with use_fastrl(trainer) as handle:
        assert handle.fused


SETTINGS = {
    "no log-probabilities to replace": ({}, {"fused": False}, "fused must be None or True"),
    "no sampler": ({}, {"replay_kept_tokens": True}, "replay_kept_tokens must be False for a Dis"),
    "a backend that cannot run": ({}, {"backend": "cuda"}, "backend 'cuda' cannot do this call"),
    "no teacher": ({"teacher_model": None}, {}, "has no teacher_model"),
    "a teacher without a head": (
        {"teacher_model": types.SimpleNamespace()},
        {},
        "must be a causal language model",
    ),
    "a teacher on several devices": (
        {"teacher_model": types.SimpleNamespace(hf_device_map={"a": 0, "b": 1})},
        {},
        "several devices",
    ),
    "a patched loss": ({"compute_loss": print}, {}, r"trainer\.compute_loss is already replaced"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_refused(name, trainer, monkeypatch):
    changes, options, sentence = SETTINGS[name]
    for attribute, value in changes.items():
        monkeypatch.setattr(trainer, attribute, value, raising=False)
    before = dict(trainer.__dict__)
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer, **options)
    assert trainer.__dict__ == before


def other_loss(student_hidden_states, **_):
    return None


def without_the_function(self, student, inputs, count):
    return None


def test_a_trl_with_another_loss_is_refused(trainer, monkeypatch):
    functions = trl.DistillationTrainer._compute_loss.__globals__
    with monkeypatch.context() as patch:
        patch.setitem(functions, "_chunked_divergence_loss", other_loss)
        with pytest.raises(ValueError, match="does not take student_hidden_states, teacher_hidden"):
            use_fastrl(trainer)
    monkeypatch.setattr(trl.DistillationTrainer, "_compute_loss", without_the_function)
    with pytest.raises(ValueError, match="does not call _chunked_divergence_loss"):
        use_fastrl(trainer)


def test_a_handle_restores_what_is_still_its_own(tiny_path, tmp_path):
    owner = types.SimpleNamespace(first=1)
    handle = use_fastrl(make_distillation(tiny_path, output_dir=tmp_path))
    handle.replace(owner, "first", 2)
    handle.replace(owner, "second", 3)
    handle.replace(owner, "third", 4)
    handle.replace(owner, "third", 5)
    owner.second = 6
    handle.undo()
    assert vars(owner) == {"first": 1, "second": 6}
    assert handle.undone


def test_a_copy_of_a_method_finds_other_globals():
    class Owner:
        value = 2

        def method(self, x, *, y=10):
            return self.value, x, y, LIMIT

    own = Owner().method
    assert with_globals(own, LIMIT=4)(3) == (2, 3, 10, 4)
    assert own(3) == (2, 3, 10, 1)


LIMIT = 1
