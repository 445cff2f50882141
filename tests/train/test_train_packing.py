"""Rows of sequences, recomputation and tiles: all give the gradients of padded sequences."""

import copy
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fastrl.integrations.transformers import by_sequence
from fastrl.integrations.transformers.by_sequence import Span, make_layout
from fastrl.train.config import GrpoConfig
from fastrl.train.packing import micro_batches, minibatches
from fastrl.train.policy import check_packing, completion_logprobs
from fastrl.train.recomputation import save_memory
from tests.train import packed
from tests.train.packed import CONFIGS, GPT2, LENGTHS, PROMPTS, SMALL, make_model, make_rollout

EVERY = torch.arange(8)
CHECKPOINTED = {"gradient_checkpointing": True}
SETTINGS = [
    {"tokens_per_micro_batch": 1},
    {"tokens_per_micro_batch": 40},
    {"tokens_per_micro_batch": 77, "attention": "sdpa"},
    {"tokens_per_micro_batch": 77, **CHECKPOINTED},
    {"mlp_tile": 16},
    {"mlp_tile": 50, "attention": "sdpa", **CHECKPOINTED},
]
# the MLP of GPT-2 has no linear layers to tile
CASES = [(kind, s) for kind in CONFIGS for s in SETTINGS if kind != "gpt2" or "mlp_tile" not in s]


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
@pytest.mark.parametrize(("preset", "holes"), [("grpo", False), ("dapo", True)])
def test_every_grouping_gives_the_gradients_of_padded_sequences(kind, settings, preset, holes):
    """By sequence, completions of a prompt in one row share it; by transformers' sdpa, none do."""
    model, config = make_model(kind, **settings)
    assert all(parameter.grad is None for parameter in model.parameters())  # as save_memory left it
    rollout = make_rollout(holes=holes)
    truth = packed.expected(model, rollout, preset)
    packed.assert_equal(truth, packed.learn(model, config, rollout, preset))
    some = completion_logprobs(model, rollout, torch.tensor([6, 2]), config)
    chosen = torch.isin(EVERY, torch.tensor([6, 2]))[:, None]
    torch.testing.assert_close(some, truth[0].where(chosen, 0.0), rtol=0, atol=1e-5)
    check_packing(model, config)
    assert model.config._attn_implementation == config.attention  # as before


def test_long_sequences_are_attended_to_in_parts():
    model, config = make_model("gemma3")
    rollout = make_rollout((500, 600, 3), (700, 600))
    rollout.prompt_of[:] = torch.tensor([0, 1, 1])  # one alone, and two that share a prompt
    packed.assert_equal(packed.expected(model, rollout), packed.learn(model, config, rollout))


def test_a_layout_covers_each_token_once():
    spans = [Span(0, 5), Span(5, 6), Span(6, 1200), Span(1200, 1210, (6, 1200)), Span(1210, 1290)]
    layout = make_layout(spans, torch.device("cpu"))
    assert layout.queries[layout.order].tolist() == list(range(1290))
    assert sum(block.spans * block.keys for block in layout.blocks) == len(layout.keys)
    assert len(layout.keys) < 1290 + 1194 + 64  # a prefix, and little padding
    long = make_layout([Span(0, 1500), Span(1500, 2600)], torch.device("cpu"))
    assert (len(long.blocks), *long[1:]) == (2, None, None, None)  # nothing is copied


@pytest.mark.parametrize("share", [False, True])
def test_rows_hold_each_token_once_and_fit_the_budget(share):
    """And a shared prompt once; nothing after the last scored token, no completion without any."""

    def rows_of(tokens):
        return list(micro_batches(rollout, EVERY, mask, tokens=tokens, share_prompts=share))

    rollout = make_rollout()
    mask = rollout.mask
    mask[1] = mask[2, 3:] = mask[4, 5] = False  # completions of 9 and 30 tokens, and a hole
    prompts = sum(PROMPTS) if share else sum(PROMPTS[i % 3] for i in range(8) if i != 1)
    total = prompts + sum(n - 1 for n in LENGTHS) - 8 - 27
    for tokens, rows in ((total, 1), (total - 1, 2)):
        made = rows_of(tokens)
        assert [len(made), sum(b.input_ids.shape[1] for b in made)] == [rows, total]
    for tokens in (25, 50):  # a prompt that is too long for one row with all its completions
        made = rows_of(tokens)
        assert all(b.input_ids.shape[1] <= tokens or len(b.rows) == 1 for b in made)
    for batch in made:
        scored = mask[batch.rows].sum(1)
        assert batch.cu_seqlens.tolist() == [0, *scored.cumsum(0).tolist()]


def test_minibatches_are_of_whole_groups_in_another_order_each_epoch():
    config = GrpoConfig(prompts_per_step=7, group_size=3, minibatches=2, epochs=2)
    made = list(minibatches(21, config, 3))
    assert [len(rows) for rows in made] == [12, 9, 12, 9]
    epochs = torch.cat(made).view(2, 21)
    assert epochs.sort().values.tolist() == [list(range(21))] * 2
    assert torch.equal(epochs.view(-1, 3), epochs.view(-1, 3)[:, :1] + torch.arange(3))
    assert not torch.equal(*epochs)


def computed(model, config):
    """The tokens of each call of a layer in a step of one micro-batch, by the layer's name."""
    seen = defaultdict(list)
    for path, module in model.named_modules():
        if "proj" in path:
            calls = seen[path.rpartition(".")[2]]
            note = lambda _, inputs, calls=calls: calls.append(inputs[0][..., 0].numel())  # noqa: E731
            module.register_forward_pre_hook(note)
    packed.learn(model, config, make_rollout())
    return seen


def test_layers_are_recomputed_if_asked_for_and_tiles_hold_so_many_tokens(monkeypatch):
    kept, recomputed = (computed(*make_model(**c))["q_proj"] for c in ({}, CHECKPOINTED))
    assert len(kept) == 2  # layers
    assert recomputed == 2 * kept
    right, largest = Qwen3RMSNorm.forward, defaultdict(int)

    def noted(self, states):
        width = states.shape[-1]
        largest[width] = max(largest[width], states[..., 0].numel())
        return right(self, states)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", noted)
    tiled = computed(*make_model(mlp_tile=16))["down_proj"]
    assert (max(tiled), sum(tiled)) == (16, 2 * sum(kept))  # each computed and recomputed
    assert largest == {32: 16, 16: 32}  # whole states, and heads of half their width


STAR = transformers.Starcoder2Config(**SMALL, residual_dropout=0.2, embedding_dropout=0.2)
CODE = transformers.GPTBigCodeConfig(**GPT2)
OPT = transformers.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.5)


@pytest.mark.parametrize("config", [STAR, CODE, OPT], ids=lambda config: config.model_type)
def test_every_dropout_is_off(config):
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).train()
    one, other = (model(torch.arange(9)[None]).logits for _ in range(2))
    assert not torch.equal(one, other)
    save_memory(model, GrpoConfig(attention="eager"))
    one, other = (model(torch.arange(9)[None]).logits for _ in range(2))
    assert model.training
    assert torch.equal(one, other)


MAMBA = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
REFUSED = [
    (CONFIGS["llama"], {"offload_checkpoints": True, **CHECKPOINTED}, "must be off on the CPU"),
    (CONFIGS["llama"], {"attention": "flash_attention_2"}, "'flash_attention_2' is not avail"),
    (CONFIGS["gpt2"], {"mlp_tile": 8}, "mlp_tile must be null for this model"),
    (transformers.Qwen3MoeConfig(**SMALL, **EXPERTS), {"mlp_tile": 8}, "mlp_tile must be null"),
    (transformers.Gemma2Config(**SMALL, head_dim=16), {}, "does not support softcap"),
]


class TestRefused:
    @pytest.mark.parametrize(("config", "changes", "message"), REFUSED, ids=range(5))
    def test_what_a_model_cannot_do(self, config, changes, message):
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
        with pytest.raises(ValueError, match=message):
            save_memory(model, GrpoConfig(**changes))

    @pytest.mark.parametrize("tile", [None, 3])
    def test_checkpointing_without_effect(self, monkeypatch, tile):
        monkeypatch.setattr("fastrl.train.recomputation.checkpoint_layers", lambda model: None)
        with pytest.raises(ValueError, match="gradient_checkpointing has no effect"):
            make_model("llama", mlp_tile=tile, **CHECKPOINTED)

    def test_a_dropout_that_stays(self):
        model, config = make_model("llama")
        drop = torch.nn.functional.dropout
        model.model.norm.register_forward_hook(lambda _, inputs, output: drop(output, 0.5))
        with pytest.raises(ValueError, match="model must compute the same twice"):
            save_memory(model, config)

    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_a_recurrent_model_unless_sequences_are_alone(self, precision):
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**MAMBA))
        config = GrpoConfig(loss="logits", attention="eager", precision=precision)
        with pytest.raises(ValueError, match="tokens_per_micro_batch must be 1 for this model"):
            check_packing(model, config)
        check_packing(model, replace(config, tokens_per_micro_batch=1))

    def test_another_attention_than_the_models_own(self, monkeypatch):
        model, config = make_model("mistral")
        right = by_sequence._attend
        monkeypatch.setattr(by_sequence, "_attend", lambda q, k, v, *_: right(q, k, v, 2.0, None))
        with pytest.raises(ValueError, match="attention must not be by_sequence for this model"):
            check_packing(model, config)
        assert model.config._attn_implementation == "by_sequence"
        model.config.attention_chunk_size = 8
        with pytest.raises(ValueError, match="attention must be sdpa or eager for this model"):
            check_packing(model, config)
