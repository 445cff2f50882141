"""TRL's DistillationTrainer logs the same numbers at every step with fastrl and without."""

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.distilling import make_distillation
from tests.integrations.trl.runs import VOCABULARY, both, make_model, run, save_model

trl = needed("trl")
from fastrl.integrations.trl import distillation, use_fastrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
CASES = {
    "forward": {"beta": 0.0},
    "Jensen-Shannon": {"beta": 0.3, "temperature": 0.7},
    "reverse, accumulated": {"beta": 1.0, "gradient_accumulation_steps": 2},
    "mixed precision, whose autocast TRL loses": {"beta": 1.0, "bf16": True},
    "checkpointing": {"beta": 0.5, "gradient_checkpointing": True},
    "LoRA": {"beta": 0.5, "lora": LORA},
}


@pytest.fixture(scope="module")
def trainer(tiny_path, tmp_path_factory):
    return make_distillation(tiny_path, output_dir=tmp_path_factory.mktemp("out"), beta=0.3)


@pytest.mark.parametrize("name", CASES)
def test_three_steps(name, tiny_path, tmp_path):
    options = {"make": make_distillation, "output_dir": tmp_path, **CASES[name]}
    handle, steps = both(tiny_path, **options)
    assert handle.fused
    assert handle.reason is None
    assert all(step["entropy"] > 1 for step in steps)


FAMILIES = {
    "a softcap": ("Gemma2Config", {"final_logit_softcapping": 3.0}),
    "a factor on the logits": ("CohereConfig", {"logit_scale": 0.3}),
    "a divisor of the logits": ("GraniteConfig", {"logits_scaling": 2.0}),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_model_that_transforms_its_logits(name, side, tiny_path, tmp_path):
    kind, changes = FAMILIES[name]
    options = {"make": make_distillation, "output_dir": tmp_path, "max_steps": 2, "beta": 0.5}
    if side == "student":
        tiny_path = save_model(tmp_path / "model", kind, **changes)
    else:
        options["teacher"] = make_model(kind, **changes)
    both(tiny_path, **options)


def test_evaluation(trainer):
    trainer.eval_dataset, found = trainer.train_dataset, []
    for use in (False, True):
        handle = use_fastrl(trainer) if use else None
        torch.manual_seed(0)
        values = trainer.evaluate()
        found.append({k: v for k, v in values.items() if "runtime" not in k and "per_sec" not in k})
    handle.undo()
    assert found[0]["eval_loss"] > 0.1
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def batch(**changes):
    """A batch as TRL gives it to the loss, padded on both sides."""
    ids = torch.randint(4, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, 5:] = 0
    parts = {"prompt": slice(None, 3), "completion": slice(3, None)}
    found = {f"{name}_ids": ids[:, part] for name, part in parts.items()}
    return found | {f"{name}_mask": mask[:, part] for name, part in parts.items()} | changes


def of_batch(trainer, inputs, count=None):
    """The loss, its entropies and number of tokens, and the gradients of the student."""
    trainer.model.zero_grad()
    loss, entropy, tokens = trainer._compute_loss(trainer.model, inputs, count)
    (3 * loss).backward()
    return loss.detach(), entropy, tokens, [p.grad.clone() for p in trainer.model.parameters()]


TOOLS = {"tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]])}
BATCHES = {
    "tokens written by tools": (TOOLS, None),
    "a count of all ranks": (TOOLS, torch.tensor(20.0)),
    "no tokens": ({"tool_mask": torch.zeros(2, 4, dtype=torch.long)}, None),
    "no tokens here": ({"tool_mask": torch.zeros(2, 4, dtype=torch.long)}, torch.tensor(5.0)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch(name, trainer):
    changes, count = BATCHES[name]
    theirs = of_batch(trainer, batch(**changes), count)
    with use_fastrl(trainer):
        ours = of_batch(trainer, batch(**changes), count)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert theirs[0] > 0.01 or "no tokens" in name


def test_a_frozen_head(tiny_path, tmp_path):
    trainer = make_distillation(tiny_path, output_dir=tmp_path)
    trainer.model.lm_head.weight.requires_grad_(False)
    found = []
    for use in (False, True):
        handle = use_fastrl(trainer) if use else None
        trainer.model.zero_grad()
        loss, *_ = trainer._compute_loss(trainer.model, batch(), None)
        loss.backward()
        found.append([loss.detach(), trainer.model.model.layers[0].mlp.up_proj.weight.grad])
    handle.undo()
    torch.testing.assert_close(found[1], found[0])
    assert trainer.model.lm_head.weight.grad is None


def test_one_pass_without_logits_of_the_sequences(trainer, monkeypatch):
    """Neither the heads nor TRL's operator are called, and the teacher has no gradients."""
    called = []
    heads = [trainer.model.lm_head, trainer.teacher_model.lm_head]
    hooks = [head.register_forward_hook(lambda *_: called.append("head")) for head in heads]
    functions = type(trainer)._compute_loss.__globals__
    monkeypatch.setitem(functions, "ChunkedDivergenceFunction", None)
    with use_fastrl(trainer):
        of_batch(trainer, batch())
    assert called == []
    assert all(p.grad is None for p in trainer.teacher_model.parameters())
    for hook in hooks:
        hook.remove()


def test_undo_under_a_method_that_was_patched_on_top(tiny_path, tmp_path, monkeypatch):
    found = []
    for use in (False, True):
        trainer = make_distillation(tiny_path, output_dir=tmp_path, max_steps=1)
        handle = use_fastrl(trainer) if use else None
        own = trainer._compute_loss
        trainer._compute_loss = lambda *given, own=own: own(*given)
        if use:
            handle.undo()
            monkeypatch.setattr(distillation, "distillation_loss", None)
        found.append(run(trainer)[1])
    assert found[0] == found[1]


def test_undo(trainer):
    before = dict(trainer.__dict__)
    with use_fastrl(trainer, fused=True) as handle:
        assert trainer._compute_loss is not before.get("_compute_loss")
        with pytest.raises(ValueError, match=r"trainer\._compute_loss is already replaced; undo"):
            use_fastrl(trainer)
    handle.undo()
    assert trainer.__dict__ == before


def test_other_trainers_are_not_affected(trainer, tiny_path, tmp_path):
    other = make_distillation(tiny_path, output_dir=tmp_path)
    with use_fastrl(trainer):
        assert "_compute_loss" not in other.__dict__
        globals_of = type(other)._compute_loss.__globals__
        assert globals_of["_chunked_divergence_loss"].__module__ == type(other).__module__
