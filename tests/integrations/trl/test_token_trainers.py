"""SFT, DPO and KTO log the same numbers at every step with fastrl and without."""

import functools
import math

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.answering import make_answering
from tests.integrations.trl.runs import both as both_of
from tests.integrations.trl.runs import run, save_model

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
both = functools.partial(both_of, make=make_answering)

IN_PARTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
SETTINGS = {
    "SFT": ("SFT", IN_PARTS),
    "SFT, dft": ("SFT", {"loss_type": "dft"}),
    "SFT, packed": ("SFT", {"packing": True, "max_length": 8, "packing_strategy": "wrapped"}),
    "SFT, without padding": (
        "SFT",
        {"completion_only_loss": False, "padding_free": True, "max_length": None},
    ),
    "SFT, smoothed": ("SFT", {"label_smoothing_factor": 0.1}),
    "DPO": ("DPO", {}),
    "DPO, weights": ("DPO", {"use_weighting": True, "ld_alpha": 0.5, **IN_PARTS}),
    "DPO, several losses": ("DPO", {"loss_type": ["sigmoid", "sft", "ipo"]}),
    "DPO, precomputed": ("DPO", {"precompute_ref_log_probs": True}),
    "KTO": ("KTO", {}),
    "KTO, unpaired": ("KTO", {"loss_type": "apo_zero_unpaired", **IN_PARTS}),
    "KTO, precomputed": ("KTO", {"precompute_ref_log_probs": True}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_equal(name, tiny_path, tmp_path):
    kind, options = SETTINGS[name]
    handle, _ = both(tiny_path, kind, output_dir=tmp_path, max_steps=2, **options)
    assert not handle.fused
    assert handle.reason == f"TRL computes the loss of a {kind}Trainer, from log-probabilities"


MODELS = {
    "softcap": ("Gemma2Config", {"final_logit_softcapping": 3.0}),
    "scale": ("CohereConfig", {"logit_scale": 0.25}),
    "bias": ("PhiConfig", {}),
    "experts in SFT": ("MixtralConfig", {"num_local_experts": 4, "router_aux_loss_coef": 0.5}),
    "experts": ("MixtralConfig", {"num_local_experts": 4, "router_aux_loss_coef": 0.5}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path):
    kind = "SFT" if name in ("scale", "experts in SFT") else "DPO"
    config, changes = MODELS[name]
    path = save_model(tmp_path / "model", config, **changes)
    options = {"output_dir": tmp_path, "max_steps": 1, "learning_rate": 0.05, **IN_PARTS}
    _, steps = both(path, kind, **options)
    assert ("aux_loss" in steps[0]) == ("experts" in name)


@pytest.mark.parametrize("kind", ["SFT", "KTO"])
@pytest.mark.parametrize("adapter", ["LoraConfig", "PromptTuningConfig"])
def test_adapters(adapter, kind, tiny_path, tmp_path):
    peft = needed("peft")
    options = {"num_virtual_tokens": 2} if "Prompt" in adapter else {"r": 2, "lora_dropout": 0.0}
    config = getattr(peft, adapter)(task_type="CAUSAL_LM", **options)
    options = {"output_dir": tmp_path, "max_steps": 1, "learning_rate": 0.1, "peft_config": config}
    both(tiny_path, kind, gradient_checkpointing="Lora" in adapter, **options)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_a_batch_without_tokens(kind, tiny_path, tmp_path):
    """All tokens of one micro-batch are masked: a loss with a gradient, of nothing."""

    def prepared(trainer):
        collate = trainer.data_collator
        calls = []

        def masked(examples):
            batch = collate(examples)
            calls.append(batch)
            if len(calls) == 1:
                for name in ("labels", "completion_mask"):
                    if name in batch:
                        batch[name] = torch.full_like(batch[name], -100 if name == "labels" else 0)
            return batch

        trainer.data_collator = masked

    both(tiny_path, kind, prepared, output_dir=tmp_path, max_steps=2)


def test_autocast(tiny_path, tmp_path):
    """A step under bfloat16 autocast is equal to rounding, and is under it."""
    found = []
    for use in ((), (use_fastrl,)):
        trainer = make_answering(tiny_path, "DPO", output_dir=tmp_path, bf16=True, max_steps=1)
        found.append(run(trainer, *use)[0][0])
    exact = make_answering(tiny_path, "DPO", output_dir=tmp_path, max_steps=1)
    exact = run(exact, use_fastrl)[0][0]
    theirs, ours = found
    for name in ("loss", "entropy"):
        assert ours[name] == pytest.approx(theirs[name], abs=2e-2), name
        assert ours[name] != pytest.approx(exact[name], abs=1e-7), name
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-2)
    assert math.isfinite(ours["grad_norm"])


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
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
