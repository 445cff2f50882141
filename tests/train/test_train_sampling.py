"""Sampling: the distribution, its independence of micro-batches, ends, hooks, the correction."""

import math

import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from fastrl.train.config import GrpoConfig
from fastrl.train.sampling import Sampler, rollout_correction
from fastrl.train.transformers_sampler import choose
from tests.train.packed import (
    TEXTS,
    make_model,
    padded_logprobs,
    plain,
    prompts_of,
    sample,
    sharp,
)


def drawn(scores, *numbers):
    return choose(scores, 1.0, torch.tensor(numbers, dtype=torch.float64))


def test_a_token_is_where_the_cumulative_probability_passes_the_number(monkeypatch):
    scores = torch.tensor([0.1, 0.0, 0.4, 0.5]).log().expand(6, -1)
    ids, logprobs, _ = drawn(scores, 0.0, 0.0999, 0.1001, 0.4999, 0.5001, 1 - 2**-53)
    assert ids.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.1, 0.4, 0.4, 0.5, 0.5]))
    many = 2**18 + 1  # whose tail sums in float32 would lose
    for token in (0, 1, 2**17 + 3, many - 1):
        assert drawn(torch.zeros(1, many), (token + 0.5) / many)[0].item() == token
    scores = 30 * torch.randn(400, 97)
    scores[:, ::3] = scores[:, -5:] = -torch.inf
    for number in (0.0, 5e-324, 1 - 2**-53):
        assert drawn(scores, *400 * [number])[1].isfinite().all()
    monkeypatch.setattr(torch, "searchsorted", lambda *_, **__: torch.full((400, 1), 97))
    assert drawn(scores, *400 * [0.5])[1].isfinite().all()  # a parallel sum need not be monotonic


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_samples_follow_the_probabilities_at_the_temperature(tiny, temperature):
    """Frequencies within Bernstein's bounds, one of which chance breaks 1 in 1e6 times."""
    n, first = 700, []
    rollout, _ = sample(*tiny, n, max_new_tokens=1, temperature=temperature)
    for k, prompt in enumerate(rollout.prompts):
        with torch.no_grad():
            logits = plain(tiny[0])(torch.tensor([prompt])).logits[0, -1]
        p = (logits.double() / temperature).softmax(-1)
        bound = math.log(6 * len(p) / 1e-6) / n
        most = bound / 3 + (bound**2 / 9 + 2 * bound * p * (1 - p)).sqrt()
        ids = rollout.token_ids[k * n : (k + 1) * n, 0]
        first.append(torch.bincount(ids, minlength=len(p)) / n)
        assert ((first[k] - p).abs() <= most).all()
    assert (first[0] - first[1]).abs().max() > 0.02  # the prompts have different answers
    rollout, _ = sample(*tiny, 300, max_new_tokens=2, temperature=5.0)
    both = rollout.token_ids[rollout.mask.all(1)]
    assert (both[:, 0] == both[:, 1]).float().mean() < 0.1  # drawn with different numbers


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_logprobs_equal_those_of_the_model(kind):
    model, tokenizer = sharp(kind)
    rollout, _ = sample(model, tokenizer, max_new_tokens=12, temperature=0.6)
    assert rollout.mask.sum() > 60
    expected = padded_logprobs(plain(model), rollout, 0.6)
    torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-5)
    state, config = torch.get_rng_state(), GrpoConfig(max_new_tokens=6, temperature=3.0)
    rollout, _ = Sampler(model, tokenizer, config).greedy(prompts_of(tokenizer, TEXTS))
    assert torch.equal(state, torch.get_rng_state())
    assert padded_logprobs(plain(model), rollout, 1e-3).abs().max() < 1e-3  # the likeliest tokens


def test_samples_depend_on_the_seed_and_not_on_the_split_into_micro_batches(tiny, monkeypatch):
    model, tokenizer = tiny
    seen, generate, outcomes = [], model.generate, []
    monkeypatch.setattr(model, "generate", lambda **o: seen.append(o["input_ids"]) or generate(**o))
    for budget, batches in ((1, 12), (30, 7), (70, 4), (65536, 1)):
        seen.clear()
        torch.manual_seed(4)
        config = GrpoConfig(max_new_tokens=6, tokens_per_generation=budget)
        sampler = Sampler(model, tokenizer, config)
        rollout, texts = sampler.sample(prompts_of(tokenizer, TEXTS), 4)
        real, padded = sampler.engine.computed()
        outcomes.append((rollout, texts, torch.rand(1).item()))
        assert len(seen) == batches
        assert all(len(ids) * (ids.shape[1] + 6) <= budget or len(ids) == 1 for ids in seen)
        asked = sum(map(len, rollout.prompts))  # once, if all four completions are in a batch
        shared = asked - 3 + 12 if batches == 1 else 4 * asked
        assert real <= 4 * asked + int(rollout.mask.sum())
        assert batches not in (1, 12) or real == shared + int(rollout.mask.sum())
        assert padded - real >= {1: 20}.get(batches, 0)
    for other, *rest in outcomes:
        assert rest == [texts, outcomes[0][2]]
        torch.testing.assert_close(other.logprobs, rollout.logprobs, rtol=0, atol=1e-5)
    torch.manual_seed(5)
    assert sample(model, tokenizer)[1] != texts


def test_completions_end_at_any_end_token_and_are_padded():
    model, tokenizer = sharp()
    ends = torch.tensor([1, *tokenizer.convert_tokens_to_ids(list("ab1234"))])
    model.generation_config.eos_token_id = ends[:3].tolist()
    rollout, texts = sample(model, tokenizer, 64, temperature=3.0, stop=("1", "2", "3", "4"))
    ended = (torch.isin(rollout.token_ids, ends) & rollout.mask).int()
    assert rollout.lengths == torch.where(ended.any(1), ended.argmax(1) + 1, 6).tolist()
    assert torch.equal(rollout.truncated, ~ended.any(1))
    assert len(rollout.token_ids[ended > 0].unique()) >= 4
    assert (rollout.token_ids[~rollout.mask] == tokenizer.pad_token_id).all()
    whole = rollout.mask & (ended == 0)  # without the end, which may be a letter
    ids = [row[keep] for row, keep in zip(rollout.token_ids, whole, strict=True)]
    assert texts == tokenizer.batch_decode(ids)


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_a_stop_text_ends_each_completion_where_it_is_completed(pad):
    """Also if a token runs over the end of the text."""
    pieces = ["<pad>", "<eos>", "a", "b", "sto", "p", "st", "op", "opera", "x"]
    pieces.append("abcdef")  # without which transformers takes no texts
    words = Tokenizer(WordLevel({piece: i for i, piece in enumerate(pieces)}))
    words.pre_tokenizer, words.decoder = Split(" ", "removed"), Fuse()
    names = {"pad_token": pad, "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    model, _ = make_model("llama")
    model.resize_token_embeddings(len(pieces))
    options, stopped = {"max_new_tokens": 8, "stop": ("stop", "xx")}, set()
    rollout, _ = sample(model, tokenizer, 200, ("a", "b st"), **options)  # not with the prompt
    for row, n in enumerate(rollout.lengths):
        found = tokenizer.convert_ids_to_tokens(rollout.token_ids[row, :n].tolist())
        texts = "".join(found), "".join(found[:-1])
        by_text, early = (any(end in text for end in options["stop"]) for text in texts)
        stopped |= {n} if by_text else set()
        assert not early
        assert rollout.truncated[row] == (not by_text and found[-1] != "<eos>")
    assert len(stopped) > 3


def test_the_model_is_left_as_it_was_also_by_an_error():
    model, tokenizer = sharp(gradient_checkpointing=True)
    model.model.layers[1].eval()
    modes, seen = [module.training for module in model.modules()], []
    model.model.norm.register_forward_hook(lambda _, x, y: seen.append(y.shape[1]))
    sample(model, tokenizer, temperature=0.01)
    assert set(seen[1:]) == {1}  # with a cache
    model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sample(model, tokenizer)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "by_sequence"


def test_what_cannot_be_sampled_is_refused():
    model, tokenizer = sharp()
    for wrong in ("nan", "inf"):
        model.lm_head.weight.data[9] = float(wrong)
        with pytest.raises(FloatingPointError, match="logits are not finite"):
            sample(model, tokenizer)
    model.generation_config.repetition_penalty = 1.2
    with pytest.raises(ValueError, match=r"no generation settings .*repetition_penalty"):
        Sampler(model, tokenizer, GrpoConfig())


def test_the_correction_is_on_where_sampler_and_trainer_can_differ():
    half = {"precision": "bfloat16"}
    assert rollout_correction(GrpoConfig()) is None
    assert rollout_correction(GrpoConfig(**half, rollout_correction="none")) is None
    for options in (half, {"weights": "bfloat16"}, {"sampler": "vllm"}, {"sampler": "own:sampler"}):
        found = rollout_correction(GrpoConfig(**options))
        assert (found.kind, found.level, found.high) == ("truncate", "token", 2.0)
