"""Models: what is loaded and what is refused; adapters; the reference; 4-bit weights."""

import json
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import transformers

from fastrl.train.adapters import attach
from fastrl.train.config import GrpoConfig
from fastrl.train.loading import load, not_finite
from fastrl.train.policy import batches, policy_logprobs, policy_outputs, rollout_logprobs
from fastrl.train.prompts import encode
from fastrl.train.recomputation import save_memory
from fastrl.train.reference import Reference
from fastrl.train.warm_start import warm_start
from tests.support.adapters import LORA, RECORDS, adapted, logits, move_adapter, rollout_of
from tests.support.train_runs import rows, run

CPU = torch.device("cpu")
EVERY = torch.arange(len(RECORDS))
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path(__file__).with_name("ran").touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
CLASSES = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}


class Payload:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def spoil(base, file, change):
    """Change the settings in a file of a model, which also brings code; or its weights."""
    (base / "own.py").write_text(CODE)
    path = base / file
    if isinstance(change, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    elif change == "pickled":
        path.unlink()
        torch.save({"lm_head.weight": Payload()}, base / "pytorch_model.bin")
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif change == "adapter":
        path.write_text("{}")
    else:
        model = transformers.LlamaForCausalLM.from_pretrained(base)
        model.model.norm.weight.data[3] = float(change)
        model.save_pretrained(base)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model.safetensors", "pickled", r"no model\.safetensors, and pickled weights are not"),
        ("model.safetensors", "cut", "a causal LM with its tokenizer, got .*model': "),
        ("model.safetensors", "nan", r"finite weights, got a NaN or infinity in 'model\.norm"),
        ("model.safetensors", "-inf", r"finite weights, got a NaN or infinity in 'model\.norm"),
        ("config.json", {"model_type": "own", "auto_map": CLASSES}, "brings or names code"),
        ("config.json", {"_attn_implementation": "someone/kernel"}, "brings or names code"),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "No", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}},
            "brings or names code",
        ),
        ("adapter_config.json", "adapter", "it is an adapter: merge it"),
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        ("nothing", None, "there is no such directory, and on the hub: "),
    ],
)
def test_what_is_damaged_or_brings_code_is_refused(base, monkeypatch, file, change, message):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(base / "cache"))
    if change is not None:
        spoil(base, file, change)
    with pytest.raises(ValueError, match=f"^model must .*{message}"):
        load(str(base if change is not None else base / file), CPU)
    assert not list(base.parent.rglob("ran"))


def test_a_model_keeps_its_end_and_loses_its_sampling_settings(base):
    spoil(base, "generation_config.json", {"eos_token_id": 0, "do_sample": True, "top_k": 3})
    model, _ = load(str(base), CPU)
    assert (model.generation_config.eos_token_id, model.generation_config.top_k) == (0, None)
    spoil(base, "generation_config.json", {"eos_token_id": None})
    assert load(str(base), CPU)[0].generation_config.eos_token_id == 1
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (base / name).exists():
            spoil(base, name, {"eos_token": None})
    with pytest.raises(ValueError, match="model must have an end token, got none"):
        load(str(base), CPU)


@pytest.mark.parametrize("new", [True, False])
def test_bfloat16_weights_keep_float32_positions(base, new):
    model, _ = load(None if new else str(base), CPU, "bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


TARGETS = {
    ("all-linear",): {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    ("q_proj", "lm_head"): {"q_proj", "lm_head"},
}


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_an_adapter_is_attached_saved_and_restored(base, tmp_path, targets, weights):
    settings = {"lora_targets": targets, "weights": weights}
    plain, tokenizer = load(str(base), CPU, weights)
    model, *_ = adapted(base, **settings)
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained}
    assert layers == TARGETS[targets]
    assert model.get_base_model().model.layers[0].self_attn.q_proj.scaling["default"] == 2
    moved = logits(move_adapter(model))
    assert not torch.allclose(moved, logits(plain), atol=0.1)
    model.save_pretrained(tmp_path / "adapter")
    model.save_base(tmp_path / "initial")
    tokenizer.save_pretrained(tmp_path / "initial")
    assert torch.equal(logits(load(str(tmp_path / "initial"), CPU, weights)[0]), logits(plain))
    again, *_ = adapted(tmp_path / "initial", **settings)
    again.load_weights(tmp_path / "adapter")
    assert torch.equal(logits(again), moved)
    assert sum(p.requires_grad for p in again.parameters()) == len(trained)
    other, *_ = adapted(base, lora_targets=("v_proj",))
    with pytest.raises(ValueError, match=r"the adapter in .* does not fit the model"):
        other.load_weights(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_targets": ("q_proj", "qproj")}, "lora_targets must be names .* got 'qproj'"),
        ({"lora_targets": ("mlp",)}, "lora_targets: the model cannot be adapted"),
        ({"lora_targets": ("lm_head",), "freeze_head": True}, "freeze_head must be off"),
    ],
)
def test_layers_that_cannot_be_adapted(base, settings, message):
    with pytest.raises(ValueError, match=message):
        adapted(base, **settings)


def test_the_warm_start_trains_the_weights_below_the_adapter(base):
    model, tokenizer, config = adapted(base, warm_start_steps=5, freeze_head=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    records = [{**record, "demonstrations": [record["answer"]]} for record in RECORDS]
    losses = list(warm_start(model, tokenizer, encode(records, tokenizer, config), config))
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        fixed = any(part in name for part in ("lora_", "lm_head", "embed"))
        assert torch.equal(parameter, before[name]) == fixed, name
    now = logits(model)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), now, rtol=0, atol=1e-5)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_the_reference_is_the_initial_policy(base, tmp_path, weights):
    """Copied, stored and read again, or the model without its adapter."""
    model, tokenizer, config = adapted(base, weights=weights, gradient_checkpointing=True)
    save_memory(model, config)
    own, whole = load(str(base), CPU, weights)[0], replace(config, lora_rank=None)
    save_memory(own, whole)
    rollout = rollout_of(tokenizer)
    expected = rollout_logprobs(own, rollout, EVERY, whole)
    new, off = (
        Reference(own, whole, tmp_path / "a", resumed=False),
        Reference(model, config, tmp_path, resumed=False),
    )
    move_adapter(own), move_adapter(model)
    state = torch.get_rng_state()
    again = Reference(own, whole, tmp_path / "a", resumed=True)
    assert torch.equal(torch.get_rng_state(), state)
    for reference in (new, again):
        assert torch.equal(reference.logprobs(rollout, EVERY), expected)
    torch.testing.assert_close(off.logprobs(rollout, EVERY), expected, rtol=0, atol=1e-5)
    for one, settings in ((own, whole), (model, config)):
        now = rollout_logprobs(one, rollout, EVERY, settings)
        assert not torch.allclose(now, expected, atol=0.01)
    with (tmp_path / "a" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(ValueError, match=r"^resume: .* is damaged: model\.safetensors"):
        Reference(own, whole, tmp_path / "a", resumed=True)


def gradients(model, config, rollout):
    for batch in batches(rollout, EVERY, rollout.mask, config):
        policy_logprobs(policy_outputs(model, batch, config), batch, config).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


class TestQLora:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("bitsandbytes")

    @pytest.mark.parametrize("saving", [{}, {"gradient_checkpointing": True, "mlp_tile": 16}])
    def test_gradients_equal_those_on_the_dequantized_weights(self, base, saving):
        """Also after a pass in eval, in which a CPU with AVX512-BF16 would repack the weights."""
        grads, config = [], GrpoConfig(model=str(base), **LORA, **saving)
        for dequantized in (False, True):
            model, tokenizer = load(str(base), CPU, nf4=True)
            torch.manual_seed(4)
            model = attach(model.dequantize() if dequantized else model, config, str(base))
            save_memory(move_adapter(model), config)
            rollout = rollout_of(tokenizer)
            rollout_logprobs(model.eval(), rollout, EVERY, config)
            grads.append(gradients(model, config, rollout))
        assert all(grad.abs().sum() > 0 for grad in grads[0].values())
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)

    def test_the_layers_take_about_half_a_byte_per_weight(self, base):
        model, _ = load(str(base), CPU, nf4=True)
        layers = [p for p in model.parameters() if hasattr(p, "quant_state")]
        assert len(layers) == 2 * 7  # all of two layers, and not the head
        taken = sum(w.nbytes + w.absmax.nbytes + w.nested_absmax.nbytes for w in layers)
        assert taken / sum(w.quant_state.shape.numel() for w in layers) < 0.517
        layers[0].quant_state.offset.fill_(float("nan"))
        assert not_finite(model).endswith("q_proj.weight")

    @pytest.mark.parametrize(("loop", "precision"), [("grpo", "float32"), ("ppo", "bfloat16")])
    def test_a_resumed_run_equals_an_uninterrupted_one(self, small, base, loop, precision):
        small |= {
            **LORA,
            "weights": "nf4",
            "model": str(base),
            "kl_coef": 0.1,
            "precision": precision,
        }
        whole = run(loop, small, steps=2, out="whole").directory
        run(loop, small, steps=1, out="parts")
        parts = run(loop, small, steps=2, out="parts", resume=True).directory
        assert rows(parts)[-1] == rows(whole)[-1]
        assert not list(whole.glob("checkpoints/*/model.safetensors"))


def test_4_bits_need_an_adapter_a_model_and_bitsandbytes(base, monkeypatch):
    settings = {"weights": "nf4", "lora_rank": 4, "model": str(base)}
    for changes in ({"lora_rank": None}, {"model": None}, {"warm_start_steps": 3}):
        with pytest.raises(ValueError, match="weights must be float32 or bfloat16"):
            GrpoConfig(**{**settings, **changes})
    for name in ("bitsandbytes", "bitsandbytes.nn"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"weights=nf4 needs bitsandbytes.*kernels\[qlora\]"):
        load(str(base), CPU, nf4=True)
