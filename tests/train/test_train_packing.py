"""Micro-batches by tokens: any packing gives the gradients of each sequence by itself."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastrl.integrations.transformers import by_sequence
from fastrl.integrations.transformers.by_sequence import Span, make_layout
from fastrl.train.config import GrpoConfig
from fastrl.train.packing import micro_batches, minibatches
from fastrl.train.policy import check_packing, completion_logprobs
from tests.support import packed
from tests.support.packed import CONFIGS, LENGTHS, PROMPTS, make_model, make_rollout

EVERY = torch.arange(8)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("holes", [False, True])
def test_every_grouping_gives_the_gradients_of_padded_sequences(kind, holes):
    """By sequence, completions of a prompt in one row share it; by transformers' sdpa, none do."""
    model, config = make_model(kind)
    rollout = make_rollout(holes=holes)
    truth = packed.expected(model, rollout)
    for tokens in (1, 40, 77, 1000):
        cut = replace(config, tokens_per_micro_batch=tokens)
        packed.assert_equal(truth, packed.learn(model, cut, rollout))
    model.set_attn_implementation("sdpa")
    cut = replace(config, tokens_per_micro_batch=77, attention="sdpa")
    packed.assert_equal(truth, packed.learn(model, cut, rollout))


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


@pytest.mark.parametrize("holes", [False, True])
def test_rows_hold_each_token_once_and_fit_the_budget(holes):
    """But nothing after the last scored token, and no completion without any."""
    rollout = make_rollout(holes=holes)
    rollout.mask[1] = False
    rollout.mask[2, 3:] = False
    made = list(micro_batches(rollout, EVERY, rollout.mask, tokens=60))
    ends = [max(row.nonzero()[:, 0].tolist(), default=-1) + 1 for row in rollout.mask]
    sizes = [len(rollout.prompts[i % 3]) + end - 1 for i, end in enumerate(ends) if end]
    assert sum(batch.input_ids.shape[1] for batch in made) == sum(sizes)
    assert max(batch.input_ids.shape[1] for batch in made) <= max(60, *sizes)
    assert len(made) <= 2 + sum(sizes) // 60
    values = torch.randn(rollout.mask.shape)
    copied = torch.zeros_like(values)
    for batch in made:
        assert torch.equal(batch.token_ids, batch.take(rollout.token_ids))
        scored = rollout.mask[batch.rows].sum(1)
        assert batch.cu_seqlens.tolist() == [0, *scored.cumsum(0).tolist()]
        batch.put(batch.take(values), into=copied)
    assert torch.equal(copied, values * rollout.mask)


def test_a_shared_prompt_is_in_a_row_once():
    rollout = make_rollout()
    total = sum(PROMPTS) + sum(n - 1 for n in LENGTHS)
    for tokens, rows in ((total, 1), (total - 1, 2)):
        made = list(micro_batches(rollout, EVERY, rollout.mask, tokens=tokens, share_prompts=True))
        assert [len(made), sum(b.input_ids.shape[1] for b in made)] == [rows, total]
    for tokens in (30, 50):  # a prompt that is too long for one row with all its completions
        made = micro_batches(rollout, EVERY, rollout.mask, tokens=tokens, share_prompts=True)
        assert all(b.input_ids.shape[1] <= tokens or len(b.rows) == 1 for b in made)


def test_logprobs_of_some_rows():
    model, config = make_model()
    rollout = make_rollout(holes=True)
    config = replace(config, tokens_per_micro_batch=50)
    some = completion_logprobs(model, rollout, torch.tensor([6, 2]), config)
    every = completion_logprobs(model, rollout, EVERY, config)
    torch.testing.assert_close(some[[2, 6]], every[[2, 6]])
    assert some[[0, 1, 3, 4, 5, 7]].abs().sum() == 0
    torch.testing.assert_close(every, packed.expected(model, rollout)[0], rtol=0, atol=1e-5)


def test_minibatches_are_of_whole_groups():
    config = GrpoConfig(prompts_per_step=7, group_size=3, minibatches=2, epochs=2)
    torch.manual_seed(0)
    made = list(minibatches(21, config, 3))
    assert [len(rows) for rows in made] == [12, 9, 12, 9]
    for epoch in (made[:2], made[2:]):
        rows = torch.cat(epoch)
        assert sorted(rows.tolist()) == list(range(21))
        assert torch.equal(rows.view(-1, 3), rows[::3, None] + torch.arange(3))
    assert not torch.equal(torch.cat(made[:2]), torch.cat(made[2:]))  # another order


class TestCheckPacking:
    @pytest.mark.parametrize("kind", CONFIGS)
    def test_a_model_that_packs_passes(self, kind):
        model, config = make_model(kind)
        check_packing(model, config)
        assert model.config._attn_implementation == "by_sequence"  # as before

    @pytest.mark.parametrize(
        "changes", [{}, {"attention": "eager"}, {"attention": "eager", "precision": "bfloat16"}]
    )
    def test_a_recurrent_model_is_refused_unless_sequences_are_alone(self, changes):
        torch.manual_seed(0)
        sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
        config = GrpoConfig(loss="logits", **changes)
        with pytest.raises(ValueError, match="tokens_per_micro_batch must be 1 for this model"):
            check_packing(model, config)
        check_packing(model, replace(config, tokens_per_micro_batch=1))

    def test_attention_in_chunks_is_refused(self):
        model, config = make_model("llama")
        model.config.attention_chunk_size = 8
        with pytest.raises(ValueError, match="attention must be sdpa or eager for this model"):
            check_packing(model, config)

    def test_another_attention_than_the_models_own_is_refused(self, monkeypatch):
        model, config = make_model("mistral")
        right = by_sequence._attend
        monkeypatch.setattr(by_sequence, "_attend", lambda q, k, v, *_: right(q, k, v, 2.0, None))
        with pytest.raises(ValueError, match="attention must not be by_sequence for this model"):
            check_packing(model, config)
        assert model.config._attn_implementation == "by_sequence"
