"""One loss of the trainers that distil, on a batch that is given, and what they do to the teacher.

Batches are padded on both sides.
"""

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import compare, first_of, loss_of, make_trainer
from tests.integrations.trl.runs import MODELS, VOCABULARY, make_model

needed("trl")
from fastrl.integrations.transformers import LmHead, lm_head  # noqa: E402
from fastrl.integrations.trl import top_tokens, use_fastrl  # noqa: E402
from fastrl.integrations.trl.two_models import Side  # noqa: E402

PROMPT, ALL = 3, 7
#: Trainers and options; those of IWOPD compare distributions, or score tokens.
TRAINERS = {
    "Distillation": {"beta": 0.3},
    "GKD": {"temperature": 0.7},
    "GOLD": {"temperature": 0.7},
    "IWOPD": {"temperature": 0.7},
    "IWOPD, tokens": {"temperature": 0.7, "distillation_objective": "iw_opd"},
    "SDFT": {},
    "SDPO": {"distillation_mode": "full_logits"},
}
LABELLED = ("GKD", "GOLD", "IWOPD", "IWOPD, tokens")


@pytest.fixture
def trainer_of(trainers):
    return lambda name: trainers(name.partition(",")[0], **TRAINERS[name])


def batch(trainer, **changes):
    ids = torch.randint(4, VOCABULARY, (2, ALL), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, 5:] = 0
    if hasattr(trainer, "generalized_jsd_loss"):
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :PROMPT] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, **changes}
    parts = {"prompt": slice(None, PROMPT), "completion": slice(PROMPT, None)}
    found = {f"{name}_ids": ids[:, part] for name, part in parts.items()}
    found |= {f"{name}_mask": mask[:, part] for name, part in parts.items()}
    if hasattr(trainer, "_compute_self_distillation_loss"):
        found["teacher_input_ids"] = torch.cat([ids[:, 1:PROMPT], ids], 1)
        found["teacher_attention_mask"] = torch.cat([mask[:, 1:PROMPT], mask], 1)
    return found | changes


TOOLS = {"tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]])}
NO_TOKENS = {"tool_mask": torch.zeros(2, 4, dtype=torch.long)}
NO_LABELS = {"labels": torch.full((2, ALL), -100)}
SAMPLER = {"rollout_logprobs": -torch.arange(1.0, 2 * ALL + 1).view(2, ALL) / 3}
#: What the batch of a trainer has, and the number of tokens in all micro-batches.
BATCHES = [
    ("Distillation", TOOLS, None),
    ("Distillation", TOOLS, torch.tensor(20.0)),
    ("Distillation", NO_TOKENS, None),
    ("Distillation", NO_TOKENS, torch.tensor(5.0)),
    *((name, {}, count) for name in LABELLED for count in (None, 5, torch.tensor(11))),
    ("IWOPD", SAMPLER, 9),
    ("IWOPD, tokens", SAMPLER, 9),
]


@pytest.mark.parametrize(("name", "changes", "count"), BATCHES)
def test_loss_and_gradients_are_equal(name, changes, count, trainer_of):
    """Tokens of tools are left out; a given count divides; without tokens the loss is 0."""
    trainer = trainer_of(name)
    value, _, gradients = compare(trainer, batch(trainer, **changes), count)
    assert (value.abs() > 0.01) == (changes is not NO_TOKENS)
    assert len(gradients) == len(list(trainer.model.parameters()))


@pytest.mark.parametrize("name", ["GKD", "GOLD"])
def test_no_tokens(name, trainer_of):
    """Loss and gradients are 0."""
    trainer = trainer_of(name)
    with use_fastrl(trainer):
        value, _, gradients = loss_of(trainer, batch(trainer, **NO_LABELS))
    assert value == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients.values())


@pytest.mark.parametrize("name", ["SDFT", "SDPO"])
@pytest.mark.parametrize("weight", [0.4, 1.0])
def test_a_policy_loss_has_tokens_that_are_not_distilled(name, weight, trainer_of, monkeypatch):
    """SDPO distils the samples that have a demonstration; SDFT all of them."""
    trainer = trainer_of(name)
    monkeypatch.setattr(trainer.args, "distillation_weight", weight, raising=False)
    changes = {
        "self_distillation_mask": torch.tensor([1.0, 0.0]),
        "advantages": torch.tensor([0.5, -1.5]),
        "old_per_token_logps": torch.full((2, 4), -3.5),
    }
    compare(trainer, batch(trainer, **changes))


def test_a_frozen_head(tiny_path):
    trainer = make_trainer(tiny_path, "Distillation")
    trainer.model.lm_head.weight.requires_grad_(False)
    assert "lm_head.weight" not in compare(trainer, batch(trainer))[2]


@pytest.mark.parametrize("name", ["Distillation", *LABELLED])
def test_the_teacher_is_evaluated_and_a_loss_without_gradients_has_none(name, trainer_of):
    trainer = trainer_of(name)
    trainer.teacher_model.train()
    trainer.teacher_model.requires_grad_(True).zero_grad()
    with use_fastrl(trainer):
        loss_of(trainer, batch(trainer))
        assert not trainer.teacher_model.training
        assert all(p.grad is None for p in trainer.teacher_model.parameters())
        with torch.no_grad():
            loss = trainer.compute_loss(trainer.model, batch(trainer))
    assert not loss.requires_grad


@pytest.mark.parametrize("name", LABELLED)
def test_the_heads_are_called_where_outputs_are_wanted(name, trainer_of):
    """Or by a wrapper of the loss when it is undone."""
    trainer, called = trainer_of(name), []
    hooks = [
        getattr(trainer, model).lm_head.register_forward_hook(lambda *_, m=model: called.append(m))
        for model in ("model", "teacher_model")
    ]
    with use_fastrl(trainer):
        wrapped = trainer.compute_loss
        _, outputs = wrapped(trainer.model, batch(trainer), return_outputs=True)
    assert outputs.logits.shape == (2, ALL, VOCABULARY)
    wrapped(trainer.model, batch(trainer))
    assert called == ["model", "teacher_model"] * 2
    for hook in hooks:
        hook.remove()


def test_outputs_of_tpo_are_trls(tiny_path):
    trainer = make_trainer(tiny_path, "TPO")
    inputs = first_of(trainer)
    with use_fastrl(trainer):
        loss, outputs = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
        torch.testing.assert_close(trainer.compute_loss(trainer.model, inputs), loss)
    assert outputs.logits.shape == (*inputs["input_ids"].shape, VOCABULARY)


def test_one_pass_that_is_its_own(trainers, trainer_of, monkeypatch):
    """TRL's operator, which calls no head either, is not called; but by other trainers."""
    trainer, other = trainer_of("Distillation"), trainers("Distillation")
    functions = type(trainer)._compute_loss.__globals__
    monkeypatch.setitem(functions, "ChunkedDivergenceFunction", None)
    with use_fastrl(trainer):
        loss_of(trainer, batch(trainer))
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'apply'"):
            loss_of(other, batch(other))


@pytest.mark.parametrize("name", ["GKD", "GOLD"])
def test_an_image_reaches_both_models(name, trainer_of, monkeypatch):
    """GOLD gives inputs of any name to both, GKD none."""
    trainer, found = trainer_of(name), []
    for model in (trainer.model, trainer.teacher_model):
        own = model.model.forward

        def forward(*given, own=own, token_type_ids=None, **options):
            found.append(token_type_ids)
            return own(*given, **options)

        monkeypatch.setattr(model.model, "forward", forward)
    kinds = torch.zeros(2, ALL, dtype=torch.long)
    with use_fastrl(trainer):
        found.clear()
        loss_of(trainer, batch(trainer, token_type_ids=kinds))
    wanted = kinds if name == "GOLD" else None
    assert [kind is wanted for kind in found] == [True, True]


@pytest.mark.parametrize("kind", ["LlamaConfig", "Gemma2Config", "CohereConfig"])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_likeliest_tokens(kind, chunk, monkeypatch):
    """Those of the student, which `distillation_mode="topk_logits"` needs."""
    monkeypatch.setattr(top_tokens, "_CHUNK", chunk)
    changes = MODELS[kind]
    ids, sides, logits = torch.tensor([[5, 6, 7, 8]]), [], []
    for model in (make_model(kind, **changes), make_model(kind, **{**changes, "hidden_size": 32})):
        sides.append(Side(model.base_model(ids).last_hidden_state, lm_head(model)))
        logits.append(model(ids).logits.detach() / 0.7)
    mask = torch.tensor([[1, 0, 1, 1]])
    given = {"beta": 0.5, "temperature": 0.7, "has_tail": False}
    teacher = top_tokens.top_k_teacher(*sides, mask, 3, **given)
    expected = logits[0].topk(3).indices
    of_teacher = logits[1].log_softmax(-1).gather(-1, expected)
    assert (teacher.token_ids[mask == 1] == expected[mask == 1]).all()
    torch.testing.assert_close(teacher.logprobs[mask == 1], of_teacher[mask == 1])
    assert (teacher.logprobs[mask == 0] == 0).all()
    assert (teacher.beta, teacher.has_tail) == (0.5, False)


def test_likeliest_tokens_of_an_adapted_head():
    hidden, weight, bias = torch.randn(1, 2, 4), torch.randn(9, 4), torch.randn(9)
    a, b = torch.randn(2, 4), torch.randn(9, 2)
    side = Side(hidden, LmHead(weight, bias, (a, b, 0.5), 1.0, None))
    given = {"beta": 1.0, "temperature": 1.0, "has_tail": True}
    teacher = top_tokens.top_k_teacher(side, side, torch.ones(1, 2), 4, **given)
    logprobs = (hidden @ (weight + 0.5 * b @ a).t() + bias).log_softmax(-1)
    torch.testing.assert_close(teacher.logprobs, logprobs.topk(4).values)
