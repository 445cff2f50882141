"""TRL's trainers that compute whole logits log the same numbers with fastrl, which does not."""

import functools
import math

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.answering import make_answering
from tests.integrations.trl.runs import VOCABULARY, check_equal, make_model, run, save_model
from tests.integrations.trl.runs import both as both_of

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
both = functools.partial(both_of, make=make_answering)

IN_PARTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
SETTINGS = {
    "CPO": ("CPO", IN_PARTS),
    "CPO, simpo": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "CPO, ipo": ("CPO", {"loss_type": "ipo"}),
    "ORPO": ("ORPO", IN_PARTS),
    "TPO": ("TPO", IN_PARTS),
    "TPO, without references": ("TPO", {"loss_type": "tpo-l", "tpo_alpha": 0.0}),
    "A2PO": ("A2PO", {}),
    "OnlineDPO": ("OnlineDPO", {}),
    "OnlineDPO, truncated": ("OnlineDPO", {"max_length": 8}),
    "OnlineDPO, without prompts": ("OnlineDPO", {"max_length": 5}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_equal(name, tiny_path, tmp_path):
    kind, options = SETTINGS[name]
    handle, _ = both(tiny_path, kind, output_dir=tmp_path, max_steps=2, **options)
    assert not handle.fused
    assert handle.reason == f"TRL computes the loss of a {kind}Trainer, from log-probabilities"


MODELS = {
    "softcap": ("Gemma2Config", {"final_logit_softcapping": 3.0}),
    "experts": (
        "MixtralConfig",
        {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["CPO", "ORPO", "TPO"])
def test_models(kind, name, tmp_path):
    config, changes = MODELS[name]
    path = save_model(tmp_path / "model", config, **changes)
    both(path, kind, output_dir=tmp_path, max_steps=1, learning_rate=0.05)


@pytest.mark.parametrize("kind", ["CPO", "ORPO", "TPO", "OnlineDPO"])
def test_adapters(kind, tiny_path, tmp_path):
    config = needed("peft").LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.0)
    options = {"output_dir": tmp_path, "max_steps": 2, "learning_rate": 0.1, "peft_config": config}
    both(tiny_path, kind, gradient_checkpointing=True, **options)


def call(trainer, kind):
    """Call the method that is replaced, as the trainer's loss does; return tensors to compare."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    if kind == "A2PO":
        return [trainer._get_sequence_logps(trainer.model, ids, mask, 3)]
    if kind == "OnlineDPO":
        parts = (ids[:, :2], mask[:, :2], ids[:, 2:], mask[:, 2:])
        return [trainer._forward(trainer.model, *parts)]
    batch = next(iter(trainer.get_train_dataloader()))
    if kind == "TPO":
        return [trainer.compute_loss(trainer.model, batch)]
    chosen, rejected, chosen_logits, rejected_logits, nll = trainer.concatenated_forward(
        trainer.model, batch
    )
    return [chosen, rejected, chosen_logits.mean(), rejected_logits.mean(), nll]


def fail(*_):
    raise AssertionError("the head is called for logits")


@pytest.mark.parametrize("kind", ["CPO", "ORPO", "TPO", "A2PO", "OnlineDPO"])
def test_no_logits_until_undone(kind, tiny_path, tmp_path):
    trainer = make_answering(tiny_path, kind, output_dir=tmp_path)
    expected = call(trainer, kind)
    hook = trainer.model.lm_head.register_forward_hook(fail)
    before = dict(trainer.__dict__)
    with use_fastrl(trainer):
        found = call(trainer, kind)
        with pytest.raises(ValueError, match="is already replaced; undo that first"):
            use_fastrl(trainer)
    same = trainer.__dict__.keys() - {"_total_train_tokens"}  # which TPO's loss counts
    assert same == before.keys() - {"_total_train_tokens"}
    with pytest.raises(AssertionError, match="called for logits"):
        call(trainer, kind)
    hook.remove()
    torch.testing.assert_close(call(trainer, kind), expected)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_autocast(tiny_path, tmp_path):
    """A step under bfloat16 autocast is equal to rounding, and is under it."""
    found = []
    for use, bf16 in (((), True), ((use_fastrl,), True), ((use_fastrl,), False)):
        trainer = make_answering(tiny_path, "CPO", output_dir=tmp_path, bf16=bf16, max_steps=1)
        found.append(run(trainer, *use)[0][0])
    theirs, ours, exact = found
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=3e-2)
    assert ours["loss"] != pytest.approx(exact["loss"], abs=1e-7)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-2)
    assert math.isfinite(ours["grad_norm"])


def test_the_reference_is_under_autocast(tiny_path, tmp_path):
    """accelerate has put it around the forward that is not called."""
    trainer = make_answering(tiny_path, "A2PO", output_dir=tmp_path, bf16=True)
    dtypes = []
    layer = trainer.ref_model.model.layers[0].mlp
    layer.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    trainer.model = trainer.ref_model
    found = []
    for use in (False, True):
        if use:
            use_fastrl(trainer)
        found += call(trainer, "A2PO")
    assert dtypes == [torch.bfloat16] * 2
    torch.testing.assert_close(found[1], found[0], atol=0.1, rtol=0)


@pytest.mark.parametrize("kind", ["CPO", "ORPO", "TPO"])
def test_evaluation(kind, tiny_path, tmp_path):
    found = []
    for use in (False, True):
        trainer = make_answering(tiny_path, kind, output_dir=tmp_path)
        if use:
            use_fastrl(trainer)
        trainer.eval_dataset = trainer.train_dataset
        values = trainer.evaluate()
        found.append({k: v for k, v in values.items() if not k.endswith(("time", "_second"))})
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_what_does_not_fit_is_refused(tiny_path, tmp_path, monkeypatch):
    trainer = make_answering(tiny_path, "CPO", output_dir=tmp_path)
    before = dict(trainer.__dict__)

    def refused(sentence, **options):
        with pytest.raises(ValueError, match=sentence):
            use_fastrl(trainer, **options)
        assert trainer.__dict__ == before

    refused("fused must be None or False: TRL computes the loss of a CPOTrainer", fused=True)
    refused("replay_kept_tokens must be False for a CPOTrainer", replay_kept_tokens=True)
    refused("backend 'cuda' cannot do this call", backend="cuda")
    kind, name = type(trainer), "concatenated_forward"
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "__class__", type("MyTrainer", (kind,), {name: lambda *_: None}))
        refused(r"MyTrainer overrides CPOTrainer\.concatenated_forward")
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, lambda self, model, batch, cache: None)
        refused("takes model, batch, cache, not model, batch")
    peft = needed("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    trainer.model = peft.get_peft_model(make_model(), config)
    before = dict(trainer.__dict__)
    refused("does not support .* prompt or prefix tuning .*more positions than there are tokens")


def test_outputs_of_tpo_are_trls(tiny_path, tmp_path, monkeypatch):
    trainer = make_answering(tiny_path, "TPO", output_dir=tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    with use_fastrl(trainer):
        loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
        torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), loss)
    assert outputs.logits.shape == (*batch["input_ids"].shape, VOCABULARY)
    monkeypatch.setattr(type(trainer), "_compute_loss", lambda self, *_: None)
    with pytest.raises(ValueError, match=r"does not call selective_log_softmax_and_entropy and"):
        use_fastrl(trainer)


@pytest.mark.slow
def test_backbones_are_compiled_once(tiny_path, tmp_path):
    options = {"output_dir": tmp_path, "max_steps": 3}
    theirs, *_ = run(make_answering(tiny_path, "CPO", **options))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    ours, *_ = run(make_answering(tiny_path, "CPO", **options, **compiled), use_fastrl)
    check_equal(ours, theirs)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
