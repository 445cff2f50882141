"""TRL's GKDTrainer and GOLDTrainer log the same numbers with fastrl and without."""

import random

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.distilling import make_gkd
from tests.integrations.trl.runs import VOCABULARY, both, run

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
CASES = {
    "GKD, forward, its own completions": ("GKD", {"beta": 0.0, "lmbda": 1.0}),
    "GKD, Jensen-Shannon of the data": (
        "GKD",
        {"beta": 0.5, "lmbda": 0.0, "gradient_accumulation_steps": 2},
    ),
    "GKD, reverse": ("GKD", {"beta": 1.0, "temperature": 0.5}),
    "GKD, the teacher's completions": ("GKD", {"lmbda": 0.0, "seq_kd": True}),
    "GKD, LoRA and checkpointing": ("GKD", {"lora": LORA, "gradient_checkpointing": True}),
    "GOLD, forward": ("GOLD", {"beta": 0.0, "lmbda": 0.0, "temperature": 0.7}),
    "GOLD, its own completions": (
        "GOLD",
        {"beta": 0.3, "lmbda": 1.0, "gradient_accumulation_steps": 2},
    ),
    "GOLD, reverse": ("GOLD", {"beta": 1.0, "temperature": 1.5}),
}


def seeded(trainer):
    """GKD draws from this generator whether a batch is on-policy."""
    random.seed(0)


@pytest.mark.parametrize("name", CASES)
def test_three_steps(name, tiny_path, tmp_path):
    kind, options = CASES[name]
    options = {"make": make_gkd, "output_dir": tmp_path, **options}
    assert both(tiny_path, kind, seeded, **options)[0].fused


@pytest.fixture(scope="module", params=["GKD", "GOLD"])
def trainer(request, tiny_path, tmp_path_factory):
    options = {"output_dir": tmp_path_factory.mktemp("out"), "temperature": 0.7}
    return make_gkd(tiny_path, request.param, **options)


def batch(**changes):
    ids = torch.randint(4, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    labels = ids.clone()
    labels[:, :3] = labels[1, 5:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **changes}


def of_batch(trainer, inputs, count=None):
    """The loss and the gradients of the student."""
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in trainer.model.parameters()]


COUNTS = {"none": None, "a number": 5, "a tensor": torch.tensor(11)}


@pytest.mark.parametrize("count", COUNTS)
def test_a_count_of_all_micro_batches(count, trainer):
    theirs = of_batch(trainer, batch(), COUNTS[count])
    with use_fastrl(trainer):
        ours = of_batch(trainer, batch(), COUNTS[count])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert theirs[0] > 0.01


def test_no_tokens(trainer):
    labels = torch.full((2, 7), -100)
    with use_fastrl(trainer):
        loss, gradients = of_batch(trainer, batch(labels=labels))
    assert loss == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients)


def test_mixed_precision(tiny_path, tmp_path):
    """TRL rounds the logits to bfloat16."""
    found = []
    for use in (False, True):
        trainer = make_gkd(tiny_path, output_dir=tmp_path, bf16=True, lmbda=0.0, max_steps=2)
        found.append(run(trainer, *((use_fastrl,) if use else ())))
    assert found[1][1] == pytest.approx(found[0][1], rel=0.02)


def test_evaluation(trainer):
    trainer.eval_dataset, found = trainer.train_dataset, []
    for use in (False, True):
        handle = use_fastrl(trainer) if use else None
        found.append(trainer.evaluate()["eval_loss"])
    handle.undo()
    assert found[0] > 0.1
    assert found[1] == pytest.approx(found[0], abs=1e-4)


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
    called = []
    models = {"student": trainer.model, "teacher": trainer.teacher_model}
    hooks = [
        model.lm_head.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, model in models.items()
    ]
    with pytest.warns(UserWarning, match=r"hooks on the LM head \(Linear\) do not fire"):
        handle = use_fastrl(trainer)
    of_batch(trainer, batch())
    assert called == []
    _, outputs = trainer.compute_loss(trainer.model, batch(), return_outputs=True)
    assert outputs.logits.shape == (2, 7, VOCABULARY)
    assert called == ["student", "teacher"]
    for hook in hooks:
        hook.remove()
    assert all(p.grad is None for p in trainer.teacher_model.parameters())
    handle.undo()
    assert "compute_loss" not in trainer.__dict__


def test_undo_under_a_method_that_was_patched_on_top(trainer):
    theirs = of_batch(trainer, batch())
    handle = use_fastrl(trainer)
    own = trainer.compute_loss
    trainer.compute_loss = lambda *given, **options: own(*given, **options)
    handle.undo()
    called = []
    hook = trainer.model.lm_head.register_forward_hook(lambda *_: called.append(1))
    assert of_batch(trainer, batch())[0] == theirs[0]
    assert called == [1]
    hook.remove()
    del trainer.compute_loss


def test_two_vocabularies_are_refused(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "use_uld_loss", True, raising=False)
    monkeypatch.setattr(trainer, "teacher_tokenizer", None, raising=False)
    use_fastrl(trainer).undo()  # TRL compares the distributions all the same
    monkeypatch.setattr(trainer, "teacher_tokenizer", trainer.processing_class)
    with pytest.raises(ValueError, match="`use_uld_loss=True`: the loss compares sorted"):
        use_fastrl(trainer)
    assert "compute_loss" not in trainer.__dict__


def test_an_image_reaches_both_models(trainer, monkeypatch):
    """GOLD gives inputs of any name to both, GKD none."""
    found = []
    for model in (trainer.model, trainer.teacher_model):
        own = model.model.forward

        def forward(*given, own=own, token_type_ids=None, **options):
            found.append(token_type_ids)
            return own(*given, **options)

        monkeypatch.setattr(model.model, "forward", forward)
    kinds = torch.zeros(2, 7, dtype=torch.long)
    with use_fastrl(trainer):
        found.clear()
        of_batch(trainer, batch(token_type_ids=kinds))
    wanted = kinds if type(trainer).__name__ == "GOLDTrainer" else None
    assert [kind is wanted for kind in found] == [True, True]
