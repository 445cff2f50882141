"""Models that answer TRL's `fused_lm_head=True`: their values, refusals and undo."""

import collections
import functools
import types
import warnings

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import make_trainer as make_answering
from tests.integrations.trl.runs import VOCABULARY, check_equal, make_model, run

trl = needed("trl")
from fastrl.integrations.transformers import LmHead, head, lm_head  # noqa: E402
from fastrl.integrations.trl import token_outputs, use_fastrl  # noqa: E402
from fastrl.integrations.trl.fused_models import FusedModels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
LABELS = torch.tensor([[-100, -100, 7, 8, 9], [-100, 11, 12, 13, -100]])


@pytest.fixture
def trainer(tiny_path, tmp_path):
    return make_answering(tiny_path, "DPO", output_dir=tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kind": "Gemma2Config", "final_logit_softcapping": 2.0},
        {"kind": "GraniteConfig", "logits_scaling": 4.0},
        {"kind": "PhiConfig"},
        {
            "kind": "MixtralConfig",
            "num_local_experts": 4,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
        },
    ],
)
@pytest.mark.parametrize("shifted", [False, True])
def test_outputs_are_trls(changes, shifted, trainer):
    model = make_model(**changes)
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
    batch = next(iter(trainer.get_train_dataloader()))
    expected = trainer.compute_loss(trainer.model, batch)
    handle = use_fastrl(trainer)
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
    assert answered == [trainer.model, trainer.ref_model]
    handle.undo()
    handle.undo()
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
    assert len(answered) == 2
    assert before == [owner.__dict__.get(name) for owner, name in owners]


def test_a_method_that_a_wrapper_has_kept_is_trls_after_undo(trainer, answered):
    handle = use_fastrl(trainer)
    kept = trainer.compute_loss
    trainer.compute_loss = lambda *arguments, **options: kept(*arguments, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, batch)
    assert len(answered) == 2
    handle.undo()
    trainer.compute_loss(trainer.model, batch)
    assert len(answered) == 2


def test_the_reference_is_under_autocast(tiny_path, tmp_path):
    """accelerate has put it around the reference's forward before it is replaced."""
    found = []
    for use in (False, True):
        trainer = make_answering(tiny_path, "DPO", output_dir=tmp_path, bf16=True)
        dtypes = []
        trainer.ref_model.model.layers[0].mlp.register_forward_hook(
            lambda module, inputs, output, dtypes=dtypes: dtypes.append(output.dtype)
        )
        if use:
            use_fastrl(trainer)
        trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
        found.append(dtypes)
    assert found == [[torch.bfloat16]] * 2


def test_other_calls_are_the_models_own(trainer):
    expected = trainer.model(input_ids=IDS, labels=IDS)
    with use_fastrl(trainer):
        outputs = trainer.model(input_ids=IDS, labels=IDS)
        trainer.model.eval()
        generated = trainer.model.generate(input_ids=IDS, max_new_tokens=2, do_sample=False)
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(outputs.loss, expected.loss)
    assert generated.shape == (2, 7)


def test_a_second_use_is_refused(trainer):
    with use_fastrl(trainer), pytest.raises(ValueError, match="is already replaced; undo that"):
        use_fastrl(trainer)
    with use_fastrl(trainer):
        pass


def test_a_model_without_fused_lm_head_is_refused(trainer):
    del trainer.model.forward  # TRL's
    before = dict(trainer.__dict__)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no `fused_lm_head`.*computes"):
        use_fastrl(trainer)
    assert trainer.__dict__ == before
    assert "forward" not in trainer.model.__dict__


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_choices_that_do_not_fit_are_refused(kind, tiny_path, tmp_path):
    trainer = make_answering(tiny_path, kind, output_dir=tmp_path)
    sentence = f"fused must be None or False: TRL computes the loss of a {kind}Trainer"
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer, fused=True)
    with pytest.raises(ValueError, match="replay_kept_tokens must be False"):
        use_fastrl(trainer, replay_kept_tokens=True)
    trainer.model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(ValueError, match="several devices"):
        use_fastrl(trainer)


def test_a_loss_that_asks_for_logits_stops_the_run(trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(input_ids=inputs["input_ids"]).logits.sum()

    trainer.__class__ = type("OtherTrainer", (trl.DPOTrainer,), {"compute_loss": compute_loss})
    use_fastrl(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    with pytest.raises(RuntimeError, match="OtherTrainer calls its model without `fused_lm_head"):
        trainer.compute_loss(trainer.model, batch)


def test_hooks_on_a_head_give_one_warning(trainer):
    trainer.ref_model.lm_head.register_forward_hook(lambda *_: pytest.fail("must not fire"))
    batch = next(iter(trainer.get_train_dataloader()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use_fastrl(trainer)
        trainer.compute_loss(trainer.model, batch)
    (warning,) = [w for w in caught if "hooks on" in str(w.message)]
    assert str(warning.message).startswith("hooks on the LM head (Linear) do not fire")
    assert warning.filename == __file__


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_backbones_are_compiled_once(kind, tiny_path, tmp_path):
    options = {"output_dir": tmp_path, "max_steps": 3}
    theirs, *_ = run(make_answering(tiny_path, kind, **options))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    ours, *_ = run(
        make_answering(tiny_path, kind, **options, **compiled),
        lambda t: use_fastrl(t, packed=False),
    )
    check_equal(ours, theirs)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == (1 if kind == "SFT" else 2)


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
    found = []
    for use in (False, True):
        trainer = AsyncGRPOTrainer.__new__(AsyncGRPOTrainer)
        model = make_model()
        trl.trainer.utils.add_fused_lm_head(
            model, temperature=0.8, outputs=("log_probs", "entropy")
        )
        accelerator = make_answering(tiny_path, "SFT").accelerator
        trainer.__dict__ |= {
            "model": model,
            "accelerator": accelerator,
            "args": types.SimpleNamespace(n_gpu=1),
            "temperature": 0.8,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "aux_loss_enabled": False,
            "current_gradient_accumulation_steps": 2,
            "_metrics": {"train": collections.defaultdict(list)},
            "_step_forward_tokens": 0.0,
            "_step_trained_tokens": 0.0,
            "_step_seq_len_weighted": 0.0,
            "_step_samples": 0.0,
            "_step_forward_s": 0.0,
        }
        handle = use_fastrl(trainer) if use else None
        trainer.compute_loss(model, batch).backward()
        found.append((trainer._metrics["train"], [p.grad for p in model.parameters()]))
    assert answered == [model]
    assert "Async" in handle.reason
    (theirs, their_gradients), (ours, our_gradients) = found
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, abs=1e-5), name
    torch.testing.assert_close(our_gradients, their_gradients, atol=1e-6, rtol=1e-4)
