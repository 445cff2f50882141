"""Sampling: the distribution, its independence of micro-batches, ends, hooks, the correction."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.integrations.transformers.by_sequence import BY_SEQUENCE
from fastrl.train.config import GrpoConfig
from fastrl.train.sampling import Sampler, choose, rollout_correction
from tests.support import sampled
from tests.support.sampled import model_logprobs, prompts_of, sample, tiny


@pytest.fixture(scope="module")
def llama():
    return tiny()


def drawn(scores, *numbers):
    return choose(scores, 1.0, torch.tensor(numbers, dtype=torch.float64))


def test_a_token_is_where_the_cumulative_probability_passes_the_number(monkeypatch):
    scores = torch.tensor([0.1, 0.0, 0.4, 0.5]).log().expand(6, -1)
    ids, logprobs = drawn(scores, 0.0, 0.0999, 0.1001, 0.4999, 0.5001, 1 - 2**-53)
    assert ids.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.1, 0.4, 0.4, 0.5, 0.5]))
    many = 2**18 + 1  # whose tail sums in float32 would lose
    for token in (0, 1, 2**17 + 3, many - 1):
        assert drawn(torch.zeros(1, many), (token + 0.5) / many)[0].item() == token
    torch.manual_seed(0)
    scores = 30 * torch.randn(400, 97)
    scores[:, ::3] = scores[:, -5:] = -torch.inf
    for number in (0.0, 5e-324, 1 - 2**-53):
        assert drawn(scores, *400 * [number])[1].isfinite().all()
    monkeypatch.setattr(torch, "searchsorted", lambda *_, **__: torch.full((400, 1), 97))
    assert drawn(scores, *400 * [0.5])[1].isfinite().all()  # a parallel sum need not be monotonic


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_samples_follow_the_probabilities_at_the_temperature(llama, temperature):
    """Frequencies within Bernstein's bounds, one of which chance breaks 1 in 1e6 times."""
    model, tokenizer = llama
    torch.manual_seed(0)
    n, first = 700, []
    rollout, _ = sample(model, tokenizer, n, max_new_tokens=1, temperature=temperature)
    for k, prompt in enumerate(rollout.prompts):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        p = (logits.double() / temperature).softmax(-1)
        bound = math.log(6 * len(p) / 1e-6) / n
        first.append(
            torch.bincount(rollout.token_ids[k * n : (k + 1) * n, 0], minlength=len(p)) / n
        )
        most = bound / 3 + (bound**2 / 9 + 2 * bound * p * (1 - p)).sqrt()
        assert ((first[k] - p).abs() <= most).all()
    assert (first[0] - first[1]).abs().max() > 0.02  # the prompts have different answers
    rollout, _ = sample(model, tokenizer, 300, max_new_tokens=2, temperature=5.0)
    both = rollout.token_ids[rollout.mask.all(1)]
    assert (both[:, 0] == both[:, 1]).float().mean() < 0.1  # drawn with different numbers


@pytest.mark.parametrize("kind", sampled.KINDS)
def test_logprobs_equal_those_of_the_model(kind):
    model, tokenizer = tiny(kind)
    for temperature in (0.6, 1.0):
        torch.manual_seed(5)
        rollout, _ = sample(model, tokenizer, max_new_tokens=12, temperature=temperature)
        expected = model_logprobs(model, rollout, temperature)
        assert rollout.mask.sum() > 60
        torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-5)


def test_samples_depend_on_the_seed_and_not_on_the_split_into_micro_batches(llama, monkeypatch):
    model, tokenizer = llama
    seen, generate, outcomes = [], model.generate, []
    monkeypatch.setattr(model, "generate", lambda **o: seen.append(o["input_ids"]) or generate(**o))
    for budget, batches in ((1, 12), (30, 7), (70, 4), (65536, 1)):
        seen.clear()
        torch.manual_seed(4)
        config = GrpoConfig(max_new_tokens=6, tokens_per_generation=budget)
        sampler = Sampler(model, tokenizer, config)
        rollout, texts = sampler.sample(prompts_of(tokenizer), 4)
        tokens = sampler.engine.computed()
        outcomes.append((rollout, texts, torch.rand(1).item()))
        assert len(seen) == batches
        assert all(len(ids) * (ids.shape[1] + 6) <= budget or len(ids) == 1 for ids in seen)
        assert tokens.real == 4 * sum(map(len, rollout.prompts)) + int(rollout.mask.sum())
        assert tokens.padded - tokens.real >= {1: 50}.get(batches, 0)
    for other, *rest in outcomes:
        assert rest == [*outcomes[0][1:]]
        torch.testing.assert_close(other.logprobs, rollout.logprobs, rtol=0, atol=1e-5)
    torch.manual_seed(5)
    assert sample(model, tokenizer)[1] != texts


def test_greedy_takes_the_likeliest_tokens_and_no_random_numbers(llama):
    model, tokenizer = llama
    state = torch.get_rng_state()
    sampler = Sampler(model, tokenizer, GrpoConfig(max_new_tokens=6, temperature=0.3))
    rollout, _ = sampler.greedy(prompts_of(tokenizer))
    assert torch.equal(state, torch.get_rng_state())
    for prompt, ids, mask in zip(rollout.prompts, rollout.token_ids, rollout.mask, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids[mask].tolist()])).logits[0]
        assert torch.equal(logits[len(prompt) - 1 : -1].argmax(-1), ids[mask])


def test_completions_end_at_any_end_token_and_are_padded(llama):
    model, tokenizer = llama
    ends = torch.tensor([1, *tokenizer.convert_tokens_to_ids(list("ab1234"))])
    model.generation_config.eos_token_id = ends[:3].tolist()
    torch.manual_seed(0)
    rollout, texts = sample(model, tokenizer, 64, temperature=3.0, stop=("1", "2", "3", "4"))
    model.generation_config.eos_token_id = 1
    ended = (torch.isin(rollout.token_ids, ends) & rollout.mask).int()
    lengths = torch.where(ended.any(1), ended.argmax(1) + 1, 6)
    assert rollout.lengths == lengths.tolist()
    assert torch.equal(rollout.truncated, ~ended.any(1))
    assert len(rollout.token_ids[ended > 0].unique()) >= 4
    assert (rollout.token_ids[~rollout.mask] == tokenizer.pad_token_id).all()
    assert texts == tokenizer.batch_decode(rollout.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_a_stop_text_ends_each_completion_where_it_is_completed(pad):
    tokenizer = sampled.pieces_tokenizer(sampled.PIECES, pad_token=pad)
    model = sampled.pieces_model(tokenizer, tokenizer.pad_token_id)
    torch.manual_seed(0)
    rollout, _ = sample(model, tokenizer, 200, ("a", "b st"), max_new_tokens=8, stop=("stop", "xx"))
    stopped = set()
    for row, n in enumerate(rollout.lengths):
        pieces = tokenizer.convert_ids_to_tokens(rollout.token_ids[row, :n].tolist())
        written, before = "".join(pieces), "".join(pieces[:-1])
        by_text, early = (any(end in text for end in ("stop", "xx")) for text in (written, before))
        stopped |= {n} if by_text else set()
        assert not early
        assert rollout.truncated[row] == (not by_text and pieces[-1] != "<eos>")
    assert len(stopped) > 3
    torch.testing.assert_close(rollout.logprobs, model_logprobs(model, rollout), rtol=0, atol=1e-5)
    op = tokenizer.get_vocab()["op"]
    rollout, _ = sample(model, tokenizer, 200, ("st",), max_new_tokens=2, stop=("stop",))
    assert (rollout.mask[rollout.token_ids[:, 0] == op].sum(1) == 2).all()  # not with the prompt


def test_the_model_is_left_as_it_was_also_by_an_error():
    """It is sampled with a cache and in the precision of the run, whatever its training needs."""
    model, tokenizer = tiny()
    model.set_attn_implementation(BY_SEQUENCE)
    model.train().model.layers[1].eval()
    model.gradient_checkpointing_enable()
    modes, seen = [module.training for module in model.modules()], []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda _, x, y: seen.append(y))
    rollout, _ = sample(model, tokenizer, precision="bfloat16", temperature=0.01)
    assert {y.dtype for y in seen} == {torch.bfloat16}
    assert {y.shape[1] for y in seen[1:]} == {1}
    assert rollout.logprobs.dtype == torch.float32
    hook.remove()
    model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sample(model, tokenizer)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == BY_SEQUENCE


def test_logits_that_are_not_finite_are_an_error():
    model, tokenizer = tiny()
    for wrong in ("nan", "inf"):
        model.lm_head.weight.data[9] = float(wrong)
        sampler, prompts = Sampler(model, tokenizer, GrpoConfig()), prompts_of(tokenizer)
        for way in (sampler.greedy, lambda prompts, sampler=sampler: sampler.sample(prompts, 4)):
            with pytest.raises(FloatingPointError, match="logits are not finite"):
                way(prompts)


def test_what_a_hook_returns_wrongly_is_named(llama, monkeypatch):
    def wrong(prompts, group_size, complete, tokenizer):
        first, *others = complete([prompt.token_ids for prompt in prompts for _ in "ab"])
        return others + ([first._replace(**own.change)] if own.change else [])

    monkeypatch.setitem(sys.modules, "own", own := SimpleNamespace(wrong=wrong))
    for own.change, message in (
        ({}, "must return 2 completions for each of 3 prompts, got 5"),
        ({"logprobs": torch.zeros(3)}, ".* got 1 tokens, 3 log-probabilities"),
        ({"sampled": torch.ones(2) > 0}, ".* a mask of 2 with 2 true"),
        ({"sampled": torch.ones(1) < 0}, ".* a mask of 1 with 0 true"),
        ({"token_ids": torch.ones(0), "logprobs": torch.ones(0)}, ".* got 0 tokens"),
    ):
        with pytest.raises(ValueError, match=f"^sampler:? {message}"):
            sample(*llama, 2, sampler="own:wrong", max_new_tokens=1)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("sampler", "nothing", "sampler must be a known name or module:function, got 'nothing'"),
        ("sampler", "no_such_module:f", "sampler: importing no_such_module raised ModuleNotFound"),
        ("sampler", "math:pi", "sampler: math has no function 'pi'"),
        ("stop", ("",), "stop must not name an empty text"),
        ("stop", ("é",), "stop: no token can complete 'é'"),
        ("weights", "bfloat16", "model must have no generation settings .*repetition_penalty"),
    ],
)
def test_what_cannot_be_sampled_is_refused(option, value, message):
    model, tokenizer = tiny()
    model.generation_config.repetition_penalty = 1.2 if option == "weights" else None
    with pytest.raises(ValueError, match=f"^{message}"):
        Sampler(model, tokenizer, GrpoConfig(**{option: value}))


def test_the_correction_is_on_where_sampler_and_trainer_can_differ():
    half = {"precision": "bfloat16"}
    assert rollout_correction(GrpoConfig()) is None
    assert rollout_correction(GrpoConfig(**half, rollout_correction="none")) is None
    for options in (half, {"weights": "bfloat16"}, {"sampler": "vllm"}):
        found = rollout_correction(GrpoConfig(**options))
        assert (found.kind, found.level, found.high) == ("truncate", "token", 2.0)
