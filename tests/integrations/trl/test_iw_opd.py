"""TRL's IWOPDTrainer logs the same numbers with fastrl and without."""

import random

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.distilling import make_gkd
from tests.integrations.trl.runs import VOCABULARY, both, save_model

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

ALL = {"distillation_objective": "jsd", "loss_top_k": 0}
TOKENS = {"distillation_objective": "iw_opd"}
CASES = {
    "tokens": {**TOKENS, "iw_opd_gamma": 0.7},
    "tokens, accumulated, another temperature": {
        **TOKENS,
        "gradient_accumulation_steps": 2,
        "temperature": 0.7,
    },
    "forward, of the data": {**ALL, "beta": 0.0, "lmbda": 0.0, "temperature": 0.7},
    "Jensen-Shannon, its own completions": {
        **ALL,
        "beta": 0.3,
        "lmbda": 1.0,
        "gradient_accumulation_steps": 2,
    },
    "reverse": {**ALL, "beta": 1.0},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A directory with a tokenizer, which TRL compares with the student's."""
    return save_model(tmp_path_factory.mktemp("teacher"), hidden_size=32)


@pytest.mark.parametrize("name", CASES)
def test_three_steps(name, tiny_path, teacher, tmp_path):
    options = {"make": make_gkd, "teacher": teacher, "output_dir": tmp_path, **CASES[name]}
    handle, steps = both(tiny_path, "IWOPD", lambda _: random.seed(0), **options)
    assert handle.fused == ("tokens" not in name)
    if not handle.fused:
        assert max(step["iw_opd/mean_abs_advantage"] for step in steps) > 0.1


@pytest.fixture(scope="module", params=["jsd", "iw_opd"])
def trainer(request, tiny_path, teacher, tmp_path_factory):
    options = {"output_dir": tmp_path_factory.mktemp("out"), "temperature": 0.7, "loss_top_k": 0}
    options["distillation_objective"] = request.param
    return make_gkd(tiny_path, "IWOPD", teacher=teacher, **options)


def batch(**changes):
    ids = torch.randint(4, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, 5:] = 0
    labels = ids.clone()
    labels[:, :3] = -100
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **changes}


def of_batch(trainer, inputs, count=None):
    """The loss and the gradients of the student."""
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in trainer.model.parameters()]


BATCHES = {
    "a count of its own": ({}, None),
    "a count of all micro-batches": ({}, torch.tensor(11)),
    "log-probabilities of the sampler": (
        {"rollout_logprobs": -torch.arange(1.0, 15).view(2, 7) / 3},
        9,
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch(name, trainer):
    changes, count = BATCHES[name]
    theirs = of_batch(trainer, batch(**changes), count)
    with use_fastrl(trainer):
        ours = of_batch(trainer, batch(**changes), count)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert theirs[0].abs() > 0.01


def test_the_teacher_is_evaluated_and_a_loss_without_gradients_has_none(trainer):
    trainer.teacher_model.train()
    trainer.teacher_model.requires_grad_(True).zero_grad()
    with use_fastrl(trainer):
        of_batch(trainer, batch())
        assert not trainer.teacher_model.training
        assert all(p.grad is None for p in trainer.teacher_model.parameters())
        with torch.no_grad():
            loss = trainer.compute_loss(trainer.model, batch())
    assert not loss.requires_grad


def test_neither_head_is_called_unless_outputs_are_wanted(trainer):
    called, before = [], dict(trainer.__dict__)
    models = {"student": trainer.model, "teacher": trainer.teacher_model}
    hooks = [
        model.lm_head.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, model in models.items()
    ]
    with pytest.warns(UserWarning, match=r"hooks on the LM head \(Linear\) do not fire"):
        handle = use_fastrl(trainer)
    of_batch(trainer, batch())
    assert called == []
    wrapped = trainer.compute_loss
    _, outputs = wrapped(trainer.model, batch(), return_outputs=True)
    assert outputs.logits.shape == (2, 7, VOCABULARY)
    handle.undo()
    wrapped(trainer.model, batch())
    assert called == ["student", "teacher"] * 2
    for hook in hooks:
        hook.remove()
    assert all(p.grad is None for p in trainer.teacher_model.parameters())
    assert trainer.__dict__ == before


def test_what_is_refused(trainer, monkeypatch):
    before = dict(trainer.__dict__)
    of_tokens = trainer.distillation_objective == "iw_opd"
    with pytest.raises(ValueError, match=f"fused must be None or {not of_tokens} for IWOPD"):
        use_fastrl(trainer, fused=of_tokens)
    monkeypatch.setattr(trainer, "loss_top_k", 1)
    if of_tokens:
        use_fastrl(trainer, fused=False).undo()
    else:
        with pytest.raises(ValueError, match="`loss_top_k > 0`, TRL's default: the divergence"):
            use_fastrl(trainer)
    monkeypatch.setattr(trainer, "use_teacher_server", True)
    with pytest.raises(ValueError, match="its teacher is a server"):
        use_fastrl(trainer)
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "teacher_model", None)
    with pytest.raises(ValueError, match="has no teacher_model"):
        use_fastrl(trainer)
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "_local_teacher_tokenizer_matches_student", False)
    with use_fastrl(trainer), pytest.raises(ValueError, match="same tokenizer"):
        trainer.compute_loss(trainer.model, batch())
    monkeypatch.undo()
    assert trainer.__dict__ == before


def test_a_trl_with_another_function_is_refused(trainer, monkeypatch):
    def other(self, student_logits, completion_tokens, labels, teacher_actual_logprobs):
        return None

    monkeypatch.setattr(type(trainer), "_compute_iw_opd_loss", other)
    with pytest.raises(ValueError, match=r"TRL does not call F\.log_softmax"):
        use_fastrl(trainer)
