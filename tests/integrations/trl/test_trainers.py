"""Which adapter a trainer of TRL gets, and what each refuses: the trainer is then unchanged."""

import importlib
import types

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import KINDS, make_trainer
from tests.integrations.trl.runs import make_model
from tests.integrations.trl.test_refusals import set_all

trl = needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.handle import with_globals  # noqa: E402
from fastrl.integrations.trl.trainers import TRAINERS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def refused(trainer, sentence, **use):
    before = dict(trainer.__dict__)
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer, **use)
    assert trainer.__dict__ == before


def test_every_trainer_has_a_kind():
    """Except one that needs a GPU, of which test_fused_models.py computes a loss."""
    names = [row.name.removesuffix("Trainer") for row in TRAINERS]
    assert set(names) - KINDS.keys() == {"AsyncGRPO"}


@pytest.mark.parametrize("row", TRAINERS, ids=lambda row: row.name)
def test_every_class_is_where_the_table_says(row):
    base = getattr(importlib.import_module(row.module), row.name)
    assert base.__module__ == row.module
    assert all(callable(getattr(base, method)) for method in row.methods)


METHODS = [(row, method) for row in TRAINERS for method in row.methods]


@pytest.mark.parametrize(("row", "method"), METHODS, ids=lambda x: getattr(x, "name", x))
def test_another_loss_is_refused(row, method, trainers, monkeypatch):
    """In a subclass, and in the instance."""
    trainer = trainers(row.name.removesuffix("Trainer"))
    with monkeypatch.context() as patch:
        own = type("MyTrainer", (type(trainer),), {method: lambda *_: None})
        patch.setattr(trainer, "__class__", own)
        refused(trainer, rf"MyTrainer overrides {row.name}\.{method}, which")
    monkeypatch.setattr(trainer, method, print)
    refused(trainer, rf"trainer\.{method} is already replaced")


def test_trls_subclass_with_another_loss_is_refused(trainers, monkeypatch):
    server = importlib.import_module("trl.experimental.server_distillation")
    trainer = trainers("Distillation")
    monkeypatch.setattr(trainer, "__class__", server.ServerDistillationTrainer)
    refused(trainer, r"ServerDis.* overrides DistillationTrainer\..*Teacher\.from_top_k")


def test_a_subclass_with_the_same_loss_is_accepted(trainers, monkeypatch):
    """As is the class of the deprecated import, whose instances have no hash."""
    trainer = trainers("Distillation")
    deprecated = importlib.import_module("trl.experimental.distillation").DistillationTrainer
    for kind in (deprecated, type("MyTrainer", (type(trainer),), {"log": print})):
        monkeypatch.setattr(trainer, "__class__", kind)
        with use_fastrl(trainer) as handle:
            assert handle.fused


@pytest.mark.parametrize("kind", KINDS)
def test_choices_that_do_not_fit_are_refused(kind, trainers, monkeypatch):
    trainer, fused = trainers(kind), KINDS[kind].fused
    refused(trainer, "backend 'cuda' cannot do this call", backend="cuda")
    if kind not in ("GRPO", "RLOO"):
        refused(trainer, f"fused must be None or {fused}", fused=not fused)
        refused(trainer, f"must be False for a {kind}Trainer", replay_kept_tokens=True)
    use_fastrl(trainer, fused=fused).undo()
    monkeypatch.setattr(trainer.model, "hf_device_map", {"a": 0, "b": 1}, raising=False)
    refused(trainer, "several devices")


def other(self, model, batch, cache):
    return None


LOSS, SERVED = "__class__._compute_loss", "use_teacher_server"
SEVERAL = types.SimpleNamespace(hf_device_map={"a": 0, "b": 1})
NO_TEACHER, NO_HEAD = "has no teacher_model", "must be a causal language model"
SERVER = r"their teacher is a server.*Teacher\.from_top_k"


@pytest.mark.parametrize(
    ("kind", "attribute", "value", "sentence"),
    [
        ("Distillation", "teacher_model", None, NO_TEACHER),
        ("Distillation", "teacher_model", types.SimpleNamespace(), NO_HEAD),
        ("Distillation", "teacher_model", SEVERAL, "several devices"),
        ("Distillation", LOSS, other, "does not call _chunked_divergence_loss"),
        ("IWOPD", "teacher_model", None, NO_TEACHER),
        ("IWOPD", SERVED, True, "its teacher is a server"),
        ("IWOPD", "loss_top_k", 1, "`loss_top_k > 0`, TRL's default: the divergence"),
        ("IWOPD", "__class__._compute_iw_opd_loss", other, r"does not call F\.log_softmax"),
        ("SDFT", SERVED, True, SERVER),
        ("SDPO", SERVED, True, SERVER),
        ("GOLD", "use_uld_loss", True, "`use_uld_loss=True`: the loss compares sorted"),
        ("CPO", "__class__.concatenated_forward", other, "takes model, batch, cache, not model"),
        ("TPO", LOSS, other, "does not call selective_log_softmax_and_entropy and"),
    ],
)
def test_a_setting_is_refused(kind, attribute, value, sentence, trainers, monkeypatch):
    trainer = trainers(kind)
    monkeypatch.setattr(trainer, "teacher_tokenizer", "another", raising=False)
    set_all(monkeypatch, trainer, {attribute: value})
    refused(trainer, sentence)


def test_settings_that_are_accepted(trainers, monkeypatch):
    """Tokens have no top k; TRL compares distributions even if asked for two vocabularies."""
    of_gold, of_iwopd = trainers("GOLD"), trainers("IWOPD")
    set_all(monkeypatch, of_gold, {"use_uld_loss": True, "teacher_tokenizer": None})
    set_all(monkeypatch, of_iwopd, {"distillation_objective": "iw_opd", "loss_top_k": 1})
    with use_fastrl(of_gold) as gold, use_fastrl(of_iwopd) as iwopd:
        assert (gold.fused, iwopd.fused) == (True, False)
    refused(of_iwopd, "fused must be None or False: TRL weights", fused=True)


def test_another_tokenizer_of_the_teacher_stops_the_loss(trainers, monkeypatch):
    trainer = trainers("IWOPD")
    monkeypatch.setattr(trainer, "_local_teacher_tokenizer_matches_student", False)
    with use_fastrl(trainer), pytest.raises(ValueError, match="same tokenizer"):
        trainer.compute_loss(trainer.model, {"labels": torch.zeros(1, 2)})


@pytest.mark.parametrize("kind", ["CPO", "ORPO", "A2PO", "OnlineDPO"])
def test_prompt_tuning_is_refused(kind, trainers, monkeypatch):
    peft, trainer = needed("peft"), trainers(kind)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    monkeypatch.setattr(trainer, "model", peft.get_peft_model(make_model(), config))
    refused(trainer, "does not support .* prompt or prefix tuning .*more positions than there are")


def test_a_trl_with_other_functions_is_refused(trainers, monkeypatch):
    functions = trl.DistillationTrainer._compute_loss.__globals__
    monkeypatch.setitem(functions, "_chunked_divergence_loss", other)
    refused(trainers("Distillation"), "does not take student_hidden_states, teacher_hidden")
    for kind in ("SDFT", "SDPO"):
        trainer = trainers(kind)
        functions = type(trainer)._compute_self_distillation_loss.__globals__
        monkeypatch.delitem(functions, "selective_log_softmax")
        refused(trainer, "TRL does not call selective_log_softmax")
        monkeypatch.undo()


def test_a_handle_restores_what_is_still_its_own(tiny_path, tmp_path):
    owner = types.SimpleNamespace(first=1)
    handle = use_fastrl(make_trainer(tiny_path, output_dir=tmp_path))
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
