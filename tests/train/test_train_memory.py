"""What is recomputed, tiled or moved saves memory and changes no gradient; dropout is off."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fastrl.train.config import GrpoConfig
from fastrl.train.recomputation import save_memory
from fastrl.train.reference import Reference
from tests.support import packed
from tests.support.packed import CONFIGS, GPT2, SMALL, make_model, make_rollout

CHECKPOINTED = {"gradient_checkpointing": True}


def saving():
    """The settings for each architecture. GPT-2 is not tiled: its MLP has no linear layers."""
    for kind in CONFIGS:
        yield kind, {**CHECKPOINTED, "tokens_per_micro_batch": 77}
        if kind != "gpt2":
            yield kind, {"mlp_tile": 16}
            yield kind, {**CHECKPOINTED, "mlp_tile": 50, "attention": "sdpa"}


@pytest.mark.parametrize(("kind", "changes"), list(saving()), ids=str)
def test_gradients_are_those_of_a_plain_model(kind, changes):
    model, config = make_model(kind, **changes)
    assert all(parameter.grad is None for parameter in model.parameters())  # as save_memory left it
    rollout = make_rollout(holes=True)
    truth = packed.expected(model, rollout, "dapo")
    packed.assert_equal(truth, packed.learn(model, config, rollout, "dapo"))


def calls(model, config, layer):
    """The tokens of each call of such layers in a step of one micro-batch."""
    seen, hooks = [], []
    for name, module in model.named_modules():
        if name.endswith(layer):
            note = lambda _, inputs: seen.append(inputs[0][..., 0].numel())  # noqa: E731
            hooks.append(module.register_forward_pre_hook(note))
    packed.learn(model, config, make_rollout())
    for hook in hooks:
        hook.remove()
    return seen


def test_layers_are_recomputed_if_and_only_if_checkpointed():
    kept, recomputed = (calls(*make_model(**c), "q_proj") for c in ({}, CHECKPOINTED))
    assert len(kept) == 2  # layers
    assert recomputed == 2 * kept


def test_tiles_hold_so_many_tokens():
    (tokens,) = set(calls(*make_model(), "q_proj"))
    tiled = calls(*make_model(mlp_tile=16), "down_proj")
    assert max(tiled) == 16
    assert sum(tiled) == 2 * 2 * tokens  # layers, each computed and recomputed


def test_norms_are_tiled_as_well(monkeypatch):
    right, seen = Qwen3RMSNorm.forward, set()

    def noted(self, states):
        seen.add((states.shape[-1], states[..., 0].numel()))
        return right(self, states)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", noted)
    model, config = make_model(mlp_tile=16)
    packed.learn(model, config, make_rollout())
    most = {width: max(rows for other, rows in seen if other == width) for width in (16, 32)}
    assert most == {32: 16, 16: 32}  # whole states, and heads of half their width


def test_the_reference_of_a_tiled_model_keeps_its_own_weights(tmp_path):
    model, config = make_model(mlp_tile=16, **CHECKPOINTED)
    rollout, rows = make_rollout(), torch.arange(8)
    reference = Reference(model, config, tmp_path / "initial", resumed=False)
    before = reference.logprobs(rollout, rows)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert torch.equal(reference.logprobs(rollout, rows), before)
    resumed = Reference(model, config, tmp_path / "initial", resumed=True)
    assert torch.equal(resumed.logprobs(rollout, rows), before)


class TestDropout:
    STAR = transformers.Starcoder2Config(**SMALL, residual_dropout=0.2, embedding_dropout=0.2)
    CODE = transformers.GPTBigCodeConfig(**GPT2, bos_token_id=1, eos_token_id=1)
    OPT = transformers.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.5)

    @pytest.mark.parametrize("config", [STAR, CODE, OPT], ids=lambda config: config.model_type)
    def test_every_dropout_is_off(self, config):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).train()
        one, other = (model(torch.arange(9)[None]).logits for _ in range(2))
        assert not torch.equal(one, other)
        save_memory(model, GrpoConfig(attention="eager"))
        one, other = (model(torch.arange(9)[None]).logits for _ in range(2))
        assert model.training
        assert torch.equal(one, other)

    def test_one_that_stays_is_an_error(self):
        model, config = make_model("llama")
        drop = torch.nn.functional.dropout
        model.model.norm.register_forward_hook(lambda _, inputs, output: drop(output, 0.5))
        with pytest.raises(ValueError, match="model must compute the same twice"):
            save_memory(model, config)


@pytest.mark.parametrize("tile", [None, 3])
def test_checkpointing_without_effect_is_refused(monkeypatch, tile):
    for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable"):
        monkeypatch.setattr(transformers.LlamaForCausalLM, name, lambda *_: None, raising=False)
    with pytest.raises(ValueError, match="gradient_checkpointing has no effect"):
        make_model("llama", mlp_tile=tile, **CHECKPOINTED)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (CONFIGS["llama"], {"offload_checkpoints": True, **CHECKPOINTED}, "must be off on the CPU"),
        (CONFIGS["llama"], {"attention": "flash_attention_2"}, "'flash_attention_2' is not avail"),
        (CONFIGS["gpt2"], {"mlp_tile": 8}, "mlp_tile must be null for this model"),
        (transformers.Qwen3MoeConfig(**SMALL, **EXPERTS), {"mlp_tile": 8}, "mlp_tile must be null"),
        (transformers.Gemma2Config(**SMALL, head_dim=16), {}, "does not support softcap"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_a_model_cannot_do_is_refused(config, changes, message):
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with pytest.raises(ValueError, match=message):
        save_memory(model, GrpoConfig(**changes))
