"""Adapters: what they train, how they are merged, and the reference with the adapter off."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from fastrl import Objective
from fastrl.train.config import GrpoConfig
from fastrl.train.data.prompts import encode
from fastrl.train.model.adapters import attach
from fastrl.train.model.loading import load
from fastrl.train.model.recomputation import save_memory
from fastrl.train.model.reference import Reference
from fastrl.train.policy import batches, policy_loss, policy_outputs, rollout_logprobs
from fastrl.train.run.checkpoint import latest
from fastrl.train.warm_start import warm_start
from tests.support.adapters import (
    DORA,
    KINDS,
    LORA,
    RECORDS,
    adapted,
    logits,
    move_adapter,
    rollout_of,
)
from tests.support.train_runs import run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_adapter_changes_nothing_and_alone_is_trained(base, kind, dtype):
    model, _ = load(str(base), "cpu", dtype=dtype)
    before = logits(model)
    config = GrpoConfig(**KINDS[kind])
    model = attach(model, config, str(base))
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained}
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers == ({"q_proj", "lm_head"} if kind == "lora_of_head" else expected)


@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (3.0, 0.75)])
def test_the_scale_of_an_adapter(base, alpha, scale):
    model, *_ = adapted(base, **LORA, lora_alpha=alpha)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == scale


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_targets": ["q_proj", "qproj"]}, "lora_targets must be names .* got 'qproj'"),
        ({"lora_targets": ["mlp"]}, "lora_targets, dora: the model cannot be adapted"),
        (
            {"lora_targets": ["lm_head"], "freeze_head": True},
            "freeze_head must be off if lora_targets names",
        ),
    ],
)
def test_layers_that_cannot_be_adapted(base, settings, message):
    with pytest.raises(ValueError, match=message):
        adapted(base, **LORA, **settings)


def test_dora_of_the_head_is_refused_at_the_start(small):
    with pytest.raises(ValueError, match=r'loss must be "logits".*plain LoRA'):
        run("grpo", small, **DORA, lora_targets=["lm_head"])


@pytest.mark.parametrize("loop", ["grpo", "ppo"])
def test_an_adapter_of_the_embeddings(small, loop):
    settings = {**LORA, "lora_targets": ["embed_tokens", "q_proj"], "steps": 1}
    assert run(loop, small, **settings).step == 1


@pytest.mark.parametrize("settings", [LORA, {}])
def test_a_missing_peft_is_named(small, base, monkeypatch, settings):
    model, *_ = adapted(base, **LORA)
    model.save_pretrained(base.parent / "adapter")
    monkeypatch.setattr("fastrl.train.extras.find_spec", lambda name: None)
    name = "lora_rank" if settings else "an adapter as model"
    with pytest.raises(ValueError, match=rf"{name} needs peft.*fastrl-kernels\[lora\]"):
        run("grpo", small, **settings, model=str(base if settings else base.parent / "adapter"))


@pytest.mark.parametrize("kind", [LORA, DORA])
def test_the_warm_start_trains_the_weights_below_the_adapter(base, kind):
    model, tokenizer, config = adapted(base, **kind, warm_start_steps=5, freeze_head=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    start = logits(model)
    prompts = encode(RECORDS, tokenizer, chat_template=False, max_tokens=32)
    losses = list(warm_start(model, tokenizer, prompts, config))
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        of_adapter = "lora_" in name
        assert parameter.requires_grad == of_adapter
        fixed = "lora_A" in name or "lora_B" in name or "lm_head" in name or "embed" in name
        assert torch.equal(parameter, before[name]) == fixed, name
    now = logits(model)
    assert not torch.allclose(now, start, atol=0.1)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), now, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_into_its_base(base, tmp_path, kind):
    model, *_ = adapted(base, **KINDS[kind])
    move_adapter(model).save_pretrained(tmp_path / "adapter")
    merged, tokenizer = load(str(tmp_path / "adapter"), "cpu")
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-4)
    assert (logits(merged) - logits(load(str(base), "cpu")[0])).abs().max() > 0.1
    assert all(p.requires_grad for p in merged.parameters())
    assert tokenizer.eos_token == "<eos>"


def test_an_adapter_without_its_base(base, tmp_path):
    model, *_ = adapted(base, **LORA)
    model.save_pretrained(tmp_path / "adapter")
    shutil.rmtree(base)
    with pytest.raises(ValueError, match=r"it is an adapter of '.*model', which cannot be"):
        load(str(tmp_path / "adapter"), "cpu")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = None
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="does not name its base model"):
        load(str(tmp_path / "adapter"), "cpu")


def test_an_adapter_of_other_layers_is_refused(base, tmp_path):
    model, *_ = adapted(base, **LORA, lora_targets=["q_proj"])
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(file.read_text())
    for targets in (["q_proj", "v_proj"], ["v_proj"]):
        file.write_text(json.dumps({**settings, "target_modules": targets}))
        with pytest.raises(ValueError, match="does not fit the model"):
            load(str(tmp_path / "adapter"), "cpu")


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_an_adapter_of_tied_embeddings_is_not_merged(base, tmp_path, layer):
    model, tokenizer = load(str(base), "cpu")
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = True
    tied = type(model)(config)
    tied.save_pretrained(tmp_path / "tied")
    tokenizer.save_pretrained(tmp_path / "tied")
    model, *_ = adapted(tmp_path / "tied", **LORA, lora_targets=[layer])
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="which are tied in its base model"):
        load(str(tmp_path / "adapter"), "cpu")


@pytest.mark.parametrize("settings", [LORA, {"kl_coef": 0.1}])
def test_a_run_starts_from_an_adapter(small, base, tmp_path, capsys, settings):
    model, *_ = adapted(base, **LORA)
    move_adapter(model).save_pretrained(tmp_path / "adapter")
    directory = run("grpo", small, model=str(tmp_path / "adapter"), **settings, steps=1).directory
    assert "is an adapter: the run starts from its base with it merged" in capsys.readouterr().out
    kept = directory / ("base" if "lora_rank" in settings else "reference")
    started = type(model.get_base_model()).from_pretrained(kept)
    torch.testing.assert_close(logits(started), logits(model), rtol=0, atol=1e-4)
    trained, _ = load(str(latest(directory / "checkpoints")), "cpu")
    assert not torch.equal(logits(trained), logits(started))


def loss_gradients(model, config, rollout, ref):
    mask, every = rollout.mask, torch.arange(len(rollout.mask))
    torch.manual_seed(3)
    advantages = torch.randn(len(mask))
    old = rollout_logprobs(model, rollout, every, config) + 0.1
    for batch in batches(rollout, every, mask, config):
        loss = policy_loss(
            policy_outputs(model, batch, config),
            batch,
            config,
            advantages[batch.rows],
            old_logprobs=batch.take(old),
            ref_logprobs=batch.take(ref),
            objective=Objective.preset("grpo", kl_coef=0.3),
            normalizer=mask.sum(),
        )
        loss.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return grads


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_off_equals_a_copied_reference(base, tmp_path, kind):
    model, tokenizer, config = adapted(base, **KINDS[kind], kl_coef=0.3)
    save_memory(model, config)
    original, _ = load(str(base), "cpu")
    save_memory(original, config)
    copied = Reference(
        original,
        replace(config, lora_rank=None, lora_targets=("all-linear",), dora=False),
        tmp_path,
        resumed=False,
    )
    off = Reference(model, config, tmp_path, resumed=False)
    move_adapter(model)
    rollout = rollout_of(tokenizer)
    every = torch.arange(len(RECORDS))
    refs = [reference.logprobs(rollout, every, config) for reference in (copied, off)]
    torch.testing.assert_close(refs[0], refs[1], rtol=0, atol=1e-5)
    own = rollout_logprobs(model, rollout, every, config)
    assert (own - refs[1]).abs().max() > 0.01  # the adapter is on again
    one, other = (loss_gradients(model, config, rollout, ref) for ref in refs)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)
        assert one[name].abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layers_and_tiles_change_no_gradient_of_an_adapter(base, kind):
    outcomes = []
    for switches in ({}, {"gradient_checkpointing": True, "mlp_tile": 16}):
        torch.manual_seed(4)
        model, tokenizer, config = adapted(base, **KINDS[kind], **switches)
        save_memory(model, config)
        move_adapter(model)
        rollout = rollout_of(tokenizer)
        ref = torch.zeros_like(rollout.logprobs)
        outcomes.append(loss_gradients(model, config, rollout, ref))
    torch.testing.assert_close(*outcomes, rtol=1e-5, atol=1e-6)
