"""Models: what is loaded and what is refused; adapters; the reference; 4-bit weights."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from safetensors.torch import load_file

from fastrl.train.adapters import attach
from fastrl.train.config import GrpoConfig, RunConfig
from fastrl.train.endings import Endings
from fastrl.train.loading import load, not_finite
from fastrl.train.policy import batches, completion_logprobs, policy_logprobs, policy_outputs
from fastrl.train.prompts import encode
from fastrl.train.recomputation import save_memory
from fastrl.train.reward_model import RewardModel
from fastrl.train.sampling import Sampler
from fastrl.train.second_models import Reference
from fastrl.train.warm_start import check_warm_start, demonstrated, frozen_head, warm_start
from tests.train.packed import make_rollout

pytestmark = pytest.mark.slow

CPU, EVERY = torch.device("cpu"), torch.arange(8)
MAP = {"AutoConfig": "own.Config", "AutoTokenizer": [None, "own.Tokenizer"]}


def logits(model):
    """Of a fixed sequence."""
    with torch.no_grad():
        return model.eval()(torch.arange(2, 22)[None]).logits.float()


def adapted(base, **settings):
    """A model with an adapter, its tokenizer and configuration."""
    config = GrpoConfig(model=str(base), lora_rank=4, **settings)
    model, tokenizer = load(str(base), CPU, config.dtype, nf4=config.weights == "nf4")
    return attach(model, config, str(base)), tokenizer, config


@torch.no_grad()
def move_adapter(model):
    """Give the adapter some effect."""
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def change(path, **settings):
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **settings}))


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("pickled", {}, r"has no model\.safetensors, and pickled weights are not loaded"),
        ("cut", {}, ""),
        ("checksums.json", {"config.json": "0"}, r"is damaged: config\.json has another sum"),
        ("config.json", {"model_type": "own", "auto_map": MAP}, "brings or names code"),
        ("config.json", {"_attn_implementation": "someone/kernel"}, "brings or names code"),
        ("tokenizer_config.json", {"tokenizer_class": "No", "auto_map": MAP}, "brings or names"),
        ("adapter_config.json", {}, "it is an adapter: merge it"),
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        ("nothing", {}, "there is no such directory, and on the hub: "),
    ],
)
def test_what_is_damaged_or_brings_code_is_refused(base, monkeypatch, file, settings, message):
    """Of a policy and of a reward model."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # nothing asks
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(base / "cache"))
    (base / "own.py").write_text(f"open({str(base / 'ran')!r}, 'w')")
    weights = base / "model.safetensors"
    if file == "pickled":
        torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
        weights.unlink()
    elif file == "cut":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif file != "nothing":
        change(base / file, **settings)
    path = str(base / file if file == "nothing" else base)
    for read in (load, lambda path, device: RewardModel(path, device, GrpoConfig())):
        with pytest.raises(ValueError, match=f"^(reward: )?model:? must .* got .*: .*{message}"):
            read(path, CPU)
    assert not (base / "ran").exists()


def test_a_model_must_be_finite_keeps_its_end_and_loses_its_sampling_settings(base):
    settings = base / "generation_config.json"
    for end, expected in ((0, [0, 1]), (None, [1])):
        change(settings, eos_token_id=end, do_sample=True, top_k=3)
        model, _ = load(str(base), CPU, "bfloat16")
        found = model.generation_config
        assert (found.eos_token_id, found.top_k, found.do_sample) == (expected, None, None)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    change(base / "tokenizer_config.json", eos_token=None)
    change(base / "config.json", eos_token_id=None)
    endless, config = load(str(base), CPU), RunConfig()
    with pytest.raises(ValueError, match="stop must name at least one token, since the model has"):
        Endings(*endless, config)
    assert str(Endings(*endless, replace(config, stop=("7",)))) == "'7'"
    for wrong in ("nan", "-inf"):
        model.model.norm.weight.data[3] = float(wrong)
        model.save_pretrained(base)
        with pytest.raises(ValueError, match=r"finite weights, got a NaN or infinity in 'model\.n"):
            load(str(base), CPU)


LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "lm_head")])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_an_adapter_is_attached_saved_and_restored(base, tmp_path, targets, weights):
    settings = {"lora_targets": targets, "weights": weights}
    plain, tokenizer = load(str(base), CPU, weights)
    model, *_ = adapted(base, **settings)
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained}
    assert layers == (LAYERS if len(targets) == 1 else set(targets))
    assert model.get_base_model().model.layers[0].self_attn.q_proj.scaling["default"] == 2
    moved, initial = logits(move_adapter(model)), tmp_path / "initial"
    assert not torch.allclose(moved, logits(plain), atol=0.1)
    model.save_pretrained(tmp_path / "adapter")
    model.save_base(initial)
    tokenizer.save_pretrained(initial)
    assert torch.equal(logits(load(str(initial), CPU, weights)[0]), logits(plain))
    again, *_ = adapted(initial, **settings)
    again.load_weights(tmp_path / "adapter")
    assert torch.equal(logits(again), moved)
    with pytest.raises(ValueError, match=r"the adapter in .* does not fit the model"):
        adapted(base, lora_targets=("v_proj",))[0].load_weights(tmp_path / "adapter")
    lora = {"lora_targets": ("lm_head",), "freeze_head": True}
    with pytest.raises(ValueError, match="freeze_head must be off if lora_targets names"):
        adapted(base, **lora)


def test_the_warm_start_trains_the_weights_below_the_adapter(base):
    model, tokenizer, config = adapted(base, warm_start_steps=5, freeze_head=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    records = [{"prompt": f"{i} + {i} =", "demonstrations": [str(2 * i)]} for i in range(6)]
    config = replace(config, learning_rate=1e-3)
    prompts = encode(records, tokenizer, config)
    losses = list(warm_start(model, tokenizer, prompts, config))
    assert losses[-1] < losses[0]
    own, full = load(str(base), CPU)[0], replace(config, lora_rank=None, learning_rate=1e-4)
    for parameter in frozen_head(own, full):
        parameter.requires_grad_(False)
    assert losses == pytest.approx(list(warm_start(own, tokenizer, prompts, full)), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        fixed = any(part in name for part in ("lora_", "lm_head", "embed"))
        assert torch.equal(parameter, before[name]) == fixed, name


def test_the_warm_start_imitates_the_answers_of_own_prompts(base):
    model, tokenizer = load(str(base), CPU)
    answers = [{"prompt": "a:", "answer": "3 + 4"}]
    config = RunConfig(model=str(base), prompts=("a.jsonl", "b.jsonl"), warm_start_steps=30)
    config = replace(config, learning_rate=1e-3, max_new_tokens=6)
    prompts = encode(answers, tokenizer, config)
    check_warm_start(prompts, tokenizer, config)
    assert list(warm_start(model, tokenizer, prompts, config))[-1] < 0.1
    completions = Sampler(model, tokenizer, config).greedy(prompts)[1]
    assert completions == ["3 + 4"]
    several = [
        {"prompt": "c:", "demonstrations": ["1"]},
        {"prompt": "d:", "demonstrations": ["2", "3"]},
    ]
    target = demonstrated(tokenizer, encode(several, tokenizer, config), [1], CPU)
    assert target.prompt_of.tolist() == [0, 1, 1]
    short = replace(config, max_new_tokens=5)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 6, which the longest"):
        check_warm_start(prompts, tokenizer, short)
    for wrong in ({}, {"answer": 7}, {"answer": ""}, {"demonstrations": []}):
        records = encode([{"prompt": "b:", **wrong}], tokenizer, config)
        with pytest.raises(ValueError, match=r"warm_start_steps must be 0 unless .* for 'b:'"):
            check_warm_start(records, tokenizer, config)
        check_warm_start(records, tokenizer, replace(config, warm_start_steps=0))


@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_the_reference_is_the_initial_policy(base, tmp_path, weights, tile):
    """Copied, stored and read again, or the model without its adapter."""
    saving = {"gradient_checkpointing": True, "mlp_tile": tile}
    model, _, config = adapted(base, weights=weights, **saving)
    own, whole = load(str(base), CPU, weights)[0], replace(config, lora_rank=None)
    save_memory(own, whole)
    save_memory(model, config)
    rollout, stored = make_rollout(), tmp_path / "a"
    expected = completion_logprobs(own, rollout, EVERY, whole)
    references = [Reference(own, whole, stored, resumed=False)]
    references.append(Reference(model, config, tmp_path, resumed=False))
    moved, state = [move_adapter(own), move_adapter(model)], torch.get_rng_state()
    references.append(Reference(own, whole, stored, resumed=True))
    assert torch.equal(torch.get_rng_state(), state)
    for reference in references:
        found = reference.logprobs(rollout, EVERY)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for one in moved:
        now = completion_logprobs(one, rollout, EVERY, whole)
        assert not torch.allclose(now, expected, atol=0.01)
    change(stored / "config.json", vocab_size=98)
    with pytest.raises(ValueError, match=r"^resume: .* is damaged: config\.json"):
        Reference(own, whole, stored, resumed=True)


@pytest.mark.parametrize("saving", [{}, {"gradient_checkpointing": True, "mlp_tile": 16}])
def test_gradients_of_qlora_equal_those_on_the_dequantized_weights(base, saving):
    """Also after a pass in eval, in which a CPU with AVX512-BF16 would repack the weights."""
    pytest.importorskip("bitsandbytes")
    grads, config = [], GrpoConfig(model=str(base), lora_rank=4, **saving)
    for dequantized in (False, True):
        model, _ = load(str(base), CPU, nf4=True)
        torch.manual_seed(4)
        model = attach(model.dequantize() if dequantized else model, config, str(base))
        save_memory(move_adapter(model), config)
        rollout = make_rollout()
        completion_logprobs(model.eval(), rollout, EVERY, config)
        (batch,) = batches(rollout, EVERY, rollout.mask, config)
        policy_logprobs(policy_outputs(model, batch, config), batch, config).sum().backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(grad.abs().sum() > 0 for grad in grads[0])
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    model, _ = load(str(base), CPU, nf4=True)
    layers = [p for p in model.parameters() if hasattr(p, "quant_state")]
    assert len(layers) == 2 * 7  # all of two layers, and not the head
    taken = sum(w.nbytes + w.absmax.nbytes + w.nested_absmax.nbytes for w in layers)
    assert taken / sum(w.quant_state.shape.numel() for w in layers) < 0.517
    layers[0].quant_state.offset.fill_(float("nan"))
    assert not_finite(model).endswith("q_proj.weight")
