"""Models that answer TRL's `fused_lm_head=True`: their values, refusals and undo."""

import collections
import contextlib
import functools
import types
import warnings

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import compare, first_of, make_trainer
from tests.integrations.trl.runs import MODELS, VOCABULARY, make_model, run

trl = needed("trl")
from fastrl.integrations.transformers import LmHead, head, lm_head  # noqa: E402
from fastrl.integrations.trl import token_outputs, use_fastrl  # noqa: E402
from fastrl.integrations.trl.fused_models import FusedModels  # noqa: E402

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
LABELS = torch.tensor([[-100, -100, 7, 8, 9], [-100, 11, 12, 13, -100]])


@pytest.fixture
def trainer(tiny_path):
    return make_trainer(tiny_path, "DPO")


HEADS = ("LlamaConfig", "Gemma2Config", "GraniteConfig", "PhiConfig", "MixtralConfig")


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("shifted", [False, True])
def test_outputs_are_trls(kind, shifted, trainer):
    model = make_model(kind, **MODELS[kind])
    labels = {"shift_labels": LABELS.roll(-1, 1)} if shifted else {"labels": LABELS}
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), **labels}
    trl.trainer.utils.add_fused_lm_head(model, temperature=0.7, outputs=ALL)
    lm_head(model)
    models = FusedModels(trainer, packed=False)
    score = functools.partial(token_outputs.token_outputs, trainer, wanted=ALL, temperature=0.7)
    found = []
    for call in (model, functools.partial(models.call, model, score)):
        model.zero_grad()
        given = {"fused_lm_head": True} if call is model else {}
        outputs = call(**inputs, **given, num_items_in_batch=3)
        (outputs.loss + 0.3 * (outputs.entropy * outputs.log_probs).sum()).backward()
        found.append((outputs, [p.grad for p in model.parameters()]))
    (theirs, their_gradients), (ours, our_gradients) = found
    assert set(theirs.keys()).issuperset({*ALL, "loss", "label_mask"})
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], msg=name)
    assert not ours.mean_logits.requires_grad
    torch.testing.assert_close(our_gradients, their_gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_mean_logits_of_any_head(cap, monkeypatch):
    monkeypatch.setattr(head, "_LOGITS", 3 * VOCABULARY)
    draw = torch.Generator().manual_seed(0)
    weight, a, b, bias, hidden = (
        torch.randn(*shape, generator=draw)
        for shape in ((VOCABULARY, 8), (2, 8), (VOCABULARY, 2), (VOCABULARY,), (2, 4, 8))
    )
    made = LmHead(weight, bias, (a, b, 0.5), 0.3, cap)
    logits = 0.3 * (hidden @ (weight + 0.5 * b @ a).T + bias)
    expected = (logits if cap is None else cap * (logits / cap).tanh()).mean(-1)
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]]).bool()
    torch.testing.assert_close(made.mean_logits(hidden), expected)
    torch.testing.assert_close(made.mean_logits(hidden, mask), expected * mask)
    none = made.mean_logits(hidden, torch.zeros_like(mask))
    assert torch.equal(none, torch.zeros(2, 4))


@pytest.fixture
def answered(monkeypatch):
    """The models whose calls fastrl answers."""
    models, own = [], FusedModels._answer

    def recorded(self, causal, *arguments, **inputs):
        models.append(causal)
        return own(self, causal, *arguments, **inputs)

    monkeypatch.setattr(FusedModels, "_answer", recorded)
    return models


def test_both_models_answer_until_undone(trainer, answered):
    owners = [(trainer, "compute_loss"), (trainer.model, "forward"), (trainer.ref_model, "forward")]
    before = [owner.__dict__.get(name) for owner, name in owners]
    batch = first_of(trainer)
    expected = trainer.compute_loss(trainer.model, batch)
    handle = use_fastrl(trainer)
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
    assert answered == [trainer.model, trainer.ref_model]
    handle.undo()
    handle.undo()
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
    assert len(answered) == 2
    assert before == [owner.__dict__.get(name) for owner, name in owners]


@pytest.mark.parametrize("kind", ["DPO", "A2PO"])
def test_the_reference_is_under_autocast(kind, tiny_path):
    """accelerate has put it around the forward, which is replaced, or is not called."""
    found = []
    for use in (contextlib.nullcontext, use_fastrl):
        trainer, dtypes = make_trainer(tiny_path, kind, bf16=True, max_steps=1), []
        layer = trainer.ref_model.model.layers[0].mlp
        layer.register_forward_hook(lambda *given, dtypes=dtypes: dtypes.append(given[-1].dtype))
        _, losses, _ = run(trainer, use)
        found.append((losses, set(dtypes)))
    assert found[0][1] == found[1][1] == {torch.bfloat16}
    assert found[1][0] == pytest.approx(found[0][0], abs=0.1)


def test_other_calls_are_the_models_own(trainer):
    expected = trainer.model(input_ids=IDS, labels=IDS)
    with use_fastrl(trainer):
        outputs = trainer.model(input_ids=IDS, labels=IDS)
        trainer.model.eval()
        generated = trainer.model.generate(input_ids=IDS, max_new_tokens=2, do_sample=False)
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(outputs.loss, expected.loss)
    assert generated.shape == (2, 7)


def test_a_loss_that_asks_for_logits_stops_the_run(trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(input_ids=inputs["input_ids"]).logits.sum()

    trainer.__class__ = type("OtherTrainer", (trl.DPOTrainer,), {"compute_loss": compute_loss})
    use_fastrl(trainer)
    batch = first_of(trainer)
    with pytest.raises(RuntimeError, match="OtherTrainer calls its model without `fused_lm_head"):
        trainer.compute_loss(trainer.model, batch)


def test_hooks_on_a_head_give_one_warning(trainer):
    trainer.ref_model.lm_head.register_forward_hook(lambda *_: pytest.fail("must not fire"))
    batch = first_of(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use_fastrl(trainer)
        trainer.compute_loss(trainer.model, batch)
    (warning,) = [w for w in caught if "hooks on" in str(w.message)]
    assert str(warning.message).startswith("hooks on the LM head (Linear) do not fire")
    assert warning.filename == __file__


def test_asynchronous_grpo(tiny_path, answered):
    """One micro-batch of its loss, as its trainer needs a GPU: two packed completions."""
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]),
        "shift_labels": torch.tensor([[-100, 7, 8, -100, 10, 11, 12, -100]]),
        "token_index": torch.tensor([[1, 2, 4, 5, 6, -1, -1, -1]]),
        "old_log_probs": torch.full((1, 8), -4.0),
        "advantages": torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0, 0, 0, 0]]),
        "segment_id": torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0]]),
        "global_n_tokens": torch.tensor([5]),
        "global_n_forward_tokens": torch.tensor([8]),
        "mean_seq_len": torch.tensor([4.0]),
        "tree_max_seqlens": torch.tensor([[4, 4]]),
        **{
            f"tree_{name}": torch.tensor([[-1]])
            for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k")
        },
    }
    model = make_model()
    trl.trainer.utils.add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    trainer = AsyncGRPOTrainer.__new__(AsyncGRPOTrainer)
    trainer.__dict__ |= {
        "model": model,
        "accelerator": make_trainer(tiny_path, "SFT").accelerator,
        "args": types.SimpleNamespace(n_gpu=1),
        "temperature": 0.8,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "aux_loss_enabled": False,
        "_metrics": {"train": collections.defaultdict(list)},
    }
    names = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
    trainer.__dict__ |= {f"_step_{name}": 0.0 for name in names}
    compare(trainer, batch)
    assert answered == [model]
    with use_fastrl(trainer) as handle:
        assert "Async" in handle.reason
