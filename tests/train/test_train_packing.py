"""Micro-batches by tokens: any packing gives the gradients of each sequence by itself."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastrl import Objective
from fastrl.train.attention import Span, make_layout
from fastrl.train.config import GrpoConfig
from fastrl.train.gradients import normalizer
from fastrl.train.model.recomputation import save_memory
from fastrl.train.packing import micro_batches
from fastrl.train.packing_check import check_packing
from fastrl.train.policy import batches, policy_loss, policy_outputs, rollout_logprobs
from fastrl.train.rollout import Rollout

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16),
    "gemma3": transformers.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=9),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=7),
    "gpt2": transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=4096, bos_token_id=1,
        eos_token_id=1, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1,
    ),
}  # fmt: skip
LENGTHS = (1, 9, 30, 2, 17, 5, 41, 8)
PROMPTS = (13, 4, 22)


def make_model(kind="qwen3", **changes):
    torch.manual_seed(7)
    config = copy.deepcopy(CONFIGS[kind])
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # far from uniform
    settings = make_config(kind, **changes)
    save_memory(model, settings)
    return model, settings


def make_config(kind="qwen3", **changes):
    loss = "logits" if kind == "gpt2" else "linear"
    return GrpoConfig(**{"loss": loss, "tokens_per_micro_batch": 100_000, **changes})


def make_rollout(lengths=LENGTHS, prompts=PROMPTS):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor(lengths)
    shape = (len(lengths), int(lengths.max()))
    return Rollout(
        prompts=[torch.randint(61, (n,), generator=generator).tolist() for n in prompts],
        prompt_of=torch.arange(len(lengths)) % len(prompts),
        token_ids=torch.randint(61, shape, generator=generator),
        mask=torch.arange(shape[1]) < lengths[:, None],
        logprobs=torch.zeros(shape),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )


def gradients(model, config, rollout, rows=None, advantages=None):
    """Log-probabilities and the gradients of a GRPO loss with KL and entropy."""
    count = len(rollout.mask)
    generator = torch.Generator().manual_seed(5)
    if advantages is None:
        advantages = torch.randn(count, generator=generator)
    old = -3 + torch.randn(rollout.mask.shape, generator=generator)
    objective = Objective.preset("grpo", kl_coef=0.1, entropy_coef=0.01, clip_high=9.0)
    rows = torch.arange(count) if rows is None else rows
    model.zero_grad()
    logprobs = torch.zeros(rollout.mask.shape)
    for batch in batches(rollout, rows, rollout.mask, config):
        result = policy_loss(
            policy_outputs(model, batch, config),
            batch,
            config,
            advantages[batch.rows],
            old_logprobs=batch.take(old),
            ref_logprobs=batch.take(old),
            objective=objective,
            normalizer=normalizer(rollout.mask, objective.aggregation),
        )
        result.loss.backward()
        batch.put(result.logprobs, into=logprobs)
    return [logprobs, *(p.grad.clone() for p in model.parameters())]


def assert_equal(one, other, tolerance=1e-5):
    scale = max(float(grad.abs().max()) for grad in one[1:])
    assert scale > 1e-3
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, scale))


def padded_gradients(model, config, rollout):
    """The same from sequences padded to one length, with transformers' own masks and autograd."""
    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(len(rollout.mask), generator=generator)
    old = -3 + torch.randn(rollout.mask.shape, generator=generator)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    plain.zero_grad()
    longest = max(map(len, rollout.prompts))
    prompts = [rollout.prompts[i] for i in rollout.prompt_of.tolist()]
    left = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    real = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    attention = torch.cat([real, rollout.mask.long()], 1)
    out = plain(
        input_ids=torch.cat([left, rollout.token_ids], 1),
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    )
    logp = out.logits[:, longest - 1 : -1].float().log_softmax(-1)
    logprobs = logp.gather(-1, rollout.token_ids[..., None])[..., 0]
    entropy = -(logp.exp() * logp).sum(-1)
    ratio = (logprobs - old).exp()
    a = advantages[:, None]
    surrogate = -torch.minimum(ratio * a, ratio.clamp(0.8, 10.0) * a)
    kl = (old - logprobs).exp() - 1 - (old - logprobs)
    per_token = (surrogate + 0.1 * kl - 0.01 * entropy) * rollout.mask
    (per_token.sum(1) / rollout.mask.sum(1)).mean().backward()
    kept = (logprobs * rollout.mask).detach()
    return [kept, *(p.grad.clone() for p in plain.parameters())]


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_equals_padded(kind):
    model, config = make_model(kind)
    rollout = make_rollout()
    assert_equal(gradients(model, config, rollout), padded_gradients(model, config, rollout))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("tokens", [1, 40, 77, 1000])
@pytest.mark.parametrize("share", [False, True])
def test_any_budget_and_shared_prompts_give_the_same_gradients(kind, tokens, share):
    model, config = make_model(kind)
    rollout = make_rollout()
    whole = gradients(model, config, rollout)
    cut = replace(config, tokens_per_micro_batch=tokens, share_prompts=share)
    assert_equal(whole, gradients(model, cut, rollout))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_of_transformers_sees_packed_rows(attention):
    model, config = make_model()
    rollout = make_rollout()
    ours = gradients(model, config, rollout)
    model.set_attn_implementation(attention)
    assert_equal(ours, gradients(model, replace(config, attention=attention), rollout))


def test_long_sequences_are_attended_to_in_parts():
    model, config = make_model("gemma3")
    rollout = make_rollout((700, 1100, 3), (900, 1200))
    rollout.prompt_of.fill_(1)
    one = gradients(model, replace(config, tokens_per_micro_batch=1), rollout)
    assert_equal(one, gradients(model, replace(config, share_prompts=True), rollout))


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"mlp_tile": 16},
        {"gradient_checkpointing": True, "mlp_tile": 7, "share_prompts": True},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_recomputation_changes_no_gradient(kind, changes):
    rollout = make_rollout()
    kept = gradients(*make_model(kind), rollout)
    assert_equal(kept, gradients(*make_model(kind, **changes), rollout), 1e-6)


def test_offloaded_checkpoints_change_no_gradient():
    model, config = make_model(gradient_checkpointing=True)
    rollout = make_rollout()
    kept = gradients(model, config, rollout)
    with torch.autograd.graph.save_on_cpu(pin_memory=False):
        assert_equal(kept, gradients(model, config, rollout), 1e-6)


def test_completions_without_advantage_have_no_gradient():
    model, config = make_model()
    rollout = make_rollout()
    advantages = torch.tensor([1.0, 0.0, -2.0, 0.0, 0.0, 0.5, 0.0, 1.0])
    objective = Objective.preset("grpo")

    def gradient(rows):
        model.zero_grad()
        for batch in batches(rollout, rows, rollout.mask, config):
            policy_loss(
                policy_outputs(model, batch, config),
                batch,
                config,
                advantages[batch.rows],
                old_logprobs=None,
                objective=objective,
                normalizer=normalizer(rollout.mask, objective.aggregation),
            ).loss.backward()
        return [torch.zeros(1), *(p.grad.clone() for p in model.parameters())]

    everything = gradient(torch.arange(8))
    assert_equal(everything, gradient(advantages.nonzero()[:, 0]), 1e-6)


def test_rows_hold_each_token_once_and_fit_the_budget():
    rollout = make_rollout()
    made = list(micro_batches(rollout, torch.arange(8), rollout.mask, tokens=60))
    sizes = [batch.input_ids.shape[1] for batch in made]
    expected = [len(rollout.prompts[i % 3]) + n - 1 for i, n in enumerate(LENGTHS)]
    assert sum(sizes) == sum(expected)
    assert max(sizes) <= max(60, *expected)
    assert len(made) <= 2 + sum(expected) // 60
    assert sorted(torch.cat([batch.rows for batch in made]).tolist()) == list(range(8))
    values = torch.randn(rollout.mask.shape)
    copied = torch.zeros_like(values)
    for batch in made:
        assert torch.equal(batch.token_ids, batch.take(rollout.token_ids))
        batch.put(batch.take(values), into=copied)
    assert torch.equal(copied, values * rollout.mask)


def test_a_shared_prompt_is_in_a_row_once():
    rollout = make_rollout()
    total = sum(PROMPTS) + sum(n - 1 for n in LENGTHS)
    for tokens, rows in ((total, 1), (total - 1, 2)):
        made = list(
            micro_batches(rollout, torch.arange(8), rollout.mask, tokens=tokens, share_prompts=True)
        )
        assert len(made) == rows
        assert sum(batch.input_ids.shape[1] for batch in made) == total


def test_masked_completions_are_left_out():
    rollout = make_rollout()
    mask = rollout.mask.clone()
    mask[[1, 4]] = False
    made = list(micro_batches(rollout, torch.arange(8), mask, tokens=50))
    assert sorted(torch.cat([batch.rows for batch in made]).tolist()) == [0, 2, 3, 5, 6, 7]


def test_a_layout_covers_each_token_once():
    spans = [Span(0, 5), Span(5, 6), Span(6, 1200), Span(1200, 1210, (6, 1200)), Span(1210, 1290)]
    layout = make_layout(spans, torch.device("cpu"))
    assert layout.queries is not None
    assert layout.order is not None
    assert layout.queries[layout.order].tolist() == list(range(1290))
    assert sum(block.spans * block.keys for block in layout.blocks) == len(layout.keys)
    long = make_layout([Span(0, 1500), Span(1500, 2600)], torch.device("cpu"))
    assert (len(long.blocks), *long[1:]) == (2, None, None, None)  # nothing is copied


def test_logprobs_of_some_rows():
    model, config = make_model()
    rollout = make_rollout()
    rows = torch.tensor([6, 2])
    some, every = (
        rollout_logprobs(model, rollout, r, replace(config, tokens_per_micro_batch=50))
        for r in (rows, torch.arange(8))
    )
    torch.testing.assert_close(some[rows], every[rows])
    assert some[[0, 1, 3, 4, 5, 7]].abs().sum() == 0


class TestCheckPacking:
    @pytest.mark.parametrize("kind", CONFIGS)
    def test_a_model_that_packs_passes(self, kind):
        for share in (False, True):
            check_packing(*make_model(kind, share_prompts=share))

    def test_shared_prompts_need_attention_by_sequence(self):
        model, config = make_model(share_prompts=True)
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="or share_prompts must be off"):
            check_packing(model, replace(config, attention="sdpa"))

    def test_a_recurrent_model_is_refused_unless_sequences_are_alone(self):
        config = transformers.MambaConfig(
            vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        settings = make_config("gpt2", attention="eager")
        with pytest.raises(ValueError, match="tokens_per_micro_batch must be 1 for this model"):
            check_packing(model, settings)
        check_packing(model, replace(settings, tokens_per_micro_batch=1))

    def test_attention_in_chunks_is_refused(self):
        model, config = make_model("llama")
        model.config.attention_chunk_size = 8
        with pytest.raises(ValueError, match="attention must be sdpa or eager for this model"):
            check_packing(model, config)

    def test_a_leak_is_found_in_bfloat16(self):
        sizes = transformers.MambaConfig(
            vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(sizes)
        settings = make_config("gpt2", attention="eager", precision="bfloat16")
        with pytest.raises(ValueError, match="tokens_per_micro_batch must be 1 for this model"):
            check_packing(model, settings)


class TestSaveMemory:
    @pytest.mark.parametrize(
        "config",
        [
            transformers.Starcoder2Config(**SMALL, residual_dropout=0.2, embedding_dropout=0.2),
            transformers.GPTBigCodeConfig(
                vocab_size=61, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
            ),
            transformers.OPTConfig(
                vocab_size=61,
                hidden_size=32,
                ffn_dim=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                word_embed_proj_dim=32,
                layerdrop=0.5,
            ),
        ],
        ids=lambda config: config.model_type,
    )
    def test_every_dropout_is_off(self, config):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        save_memory(model, make_config("gpt2", attention="eager"))
        one, other = (model(torch.arange(9)[None]).logits for _ in range(2))
        assert model.training
        assert torch.equal(one, other)

    def test_dropout_that_stays_is_an_error(self):
        model, config = make_model("llama")
        model.model.norm.register_forward_hook(
            lambda module, inputs, output: torch.nn.functional.dropout(output, 0.5)
        )
        with pytest.raises(ValueError, match="model must compute the same twice"):
            save_memory(model, config)

    def test_checkpointing_recomputes_and_dropout_is_off(self):
        model, _ = make_model("gpt2", gradient_checkpointing=True)
        assert model.training
        ids = torch.arange(8)[None]
        with torch.no_grad():
            layout = make_layout([Span(0, 8)], torch.device("cpu"))
            one, other = (model(ids, sequences=layout).logits for _ in range(2))
        assert torch.equal(one, other)

    @pytest.mark.parametrize("tile", [None, 3])
    def test_checkpointing_without_effect_is_an_error(self, monkeypatch, tile):
        for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable"):
            monkeypatch.setattr(transformers.LlamaForCausalLM, name, lambda *_: None, raising=False)
        with pytest.raises(ValueError, match="gradient_checkpointing has no effect"):
            make_model("llama", gradient_checkpointing=True, mlp_tile=tile)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"offload_checkpoints": True}, "offload_checkpoints must be off without"),
            (
                {"offload_checkpoints": True, "gradient_checkpointing": True},
                "offload_checkpoints must be off on the CPU",
            ),
            ({"attention": "flash_attention_2"}, "attention 'flash_attention_2' is not available"),
        ],
    )
    def test_what_is_not_available_is_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            make_model(**changes)

    def test_experts_are_not_tiled(self):
        config = transformers.Qwen3MoeConfig(
            **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match="mlp_tile must be null for this model"):
            save_memory(model, make_config(mlp_tile=8))
