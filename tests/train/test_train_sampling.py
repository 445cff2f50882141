"""Sampling: the distribution, its independence of micro-batches, and the rollout."""

import math

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.config import GrpoConfig
from fastrl.train.sampling import make_sampler
from fastrl.train.sampling.token_choice import choose
from tests.support.sampled import KINDS, TEXTS, model_logprobs, prompts_of, sample, tiny


@pytest.fixture(scope="module")
def llama():
    return tiny()


# ---------------------------------------------------------------- choosing a token


def test_a_token_is_where_the_cumulative_probability_passes_the_number():
    scores = torch.tensor([0.1, 0.0, 0.4, 0.5]).log().expand(6, -1)
    numbers = torch.tensor([0.0, 0.0999, 0.1001, 0.4999, 0.5001, 1 - 2**-53], dtype=torch.float64)
    token_ids, logprobs = choose(scores, 1.0, numbers)
    assert token_ids.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.1, 0.4, 0.4, 0.5, 0.5]))


@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
def test_a_token_of_probability_0_is_never_chosen(temperature):
    """Neither at the ends of the interval nor behind the last possible token."""
    torch.manual_seed(0)
    scores = 30 * torch.randn(400, 97)
    scores[:, ::3] = -torch.inf
    scores[:, -5:] = -torch.inf
    for number in (0.0, 5e-324, 1 - 2**-53):
        numbers = torch.full((400,), number, dtype=torch.float64)
        token_ids, logprobs = choose(scores, temperature, numbers)
        assert logprobs.isfinite().all()
        assert token_ids.max() < 92
        assert (token_ids % 3 != 0).all()


def test_the_last_of_very_many_equal_tokens_can_be_chosen():
    """Sums in float32 would lose the tail of a large vocabulary."""
    vocabulary = 2**18 + 1
    for token in (0, 1, 2**17 + 3, vocabulary - 1):
        number = torch.tensor([(token + 0.5) / vocabulary], dtype=torch.float64)
        assert choose(torch.zeros(1, vocabulary), 1.0, number)[0].item() == token


def test_a_row_is_chosen_from_alone():
    """Rows are taken in parts, which changes nothing."""
    torch.manual_seed(1)
    scores, numbers = torch.randn(9, 50), torch.rand(9, dtype=torch.float64)
    together = choose(scores, 0.7, numbers)[0]
    alone = [choose(scores[i : i + 1], 0.7, numbers[i : i + 1])[0].item() for i in range(9)]
    assert together.tolist() == alone


@pytest.mark.parametrize("found", [0, 3, 5])
def test_a_wrong_place_in_the_cumulative_probability_is_noticed(monkeypatch, found):
    """As a parallel sum might lead to: a token of probability 0, or the end of the vocabulary."""
    monkeypatch.setattr(torch, "searchsorted", lambda *_, **__: torch.tensor([[found]]))
    scores = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf, -torch.inf]])
    token_ids, logprobs = choose(scores, 1.0, torch.tensor([0.5], dtype=torch.float64))
    assert token_ids.item() in (1, 2)
    assert logprobs.isfinite().all()


@pytest.mark.parametrize("wrong", ["nan", "inf"])
def test_a_row_without_a_distribution_has_no_logprob(wrong):
    scores = torch.zeros(3, 5)
    scores[1, 2] = float(wrong)
    scores[2] = -torch.inf
    finite = choose(scores, 1.0, torch.rand(3, dtype=torch.float64))[1].isfinite()
    assert finite.tolist() == [True, False, False]


# ---------------------------------------------------------------- the distribution


def bernstein(n, variance, largest, log_bound):
    """What the mean of n draws exceeds by chance with probability exp(-log_bound), or less."""
    part = log_bound * largest / 3 / n
    return part + (part**2 + 2 * log_bound * variance / n) ** 0.5


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("engine", ["transformers", "continuous"])
def test_samples_follow_the_probabilities_at_the_temperature(llama, engine, temperature):
    """Frequencies, and the mean log-probability, within bounds that chance breaks 1 in 1e6 times.

    Bernstein: P(|mean - expected| > e) <= 2 exp(-n e^2 / (2 variance + 2 largest e / 3)).
    """
    model, tokenizer = llama
    n, first = 700, []
    torch.manual_seed(0)
    rollout, _ = sample(
        model, tokenizer, n, max_new_tokens=1, temperature=temperature, sampler=engine
    )
    for k, prompt in enumerate(rollout.prompts):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        each = (logits.double() / temperature).log_softmax(-1)
        p = each.exp()
        log_bound = math.log(2 * len(TEXTS) * (len(p) + 1) / 1e-6)
        drawn = rollout.token_ids[k * n : (k + 1) * n, 0]
        first.append(torch.bincount(drawn, minlength=len(p)) / n)
        assert ((first[k] - p).abs() <= bernstein(n, p * (1 - p), 1, log_bound)).all()
        expected = p @ each
        spread = bernstein(n, p @ (each - expected) ** 2, (each - expected).abs().max(), log_bound)
        assert (each[drawn].mean() - expected).abs() <= spread
    assert (first[0] - first[1]).abs().max() > 0.02  # the prompts have different answers


def test_the_second_token_follows_the_first(llama):
    """The tokens of a completion are drawn with different numbers."""
    model, tokenizer = llama
    torch.manual_seed(0)
    rollout, _ = sample(model, tokenizer, 300, max_new_tokens=2, temperature=5.0)
    both = rollout.token_ids[rollout.mask.all(1)]
    assert len(both) > 800
    assert (both[:, 0] == both[:, 1]).float().mean() < 0.1
    assert len(both.unique(dim=0)) > 500


# ---------------------------------------------------------------- micro-batches


def test_samples_do_not_depend_on_the_split_into_micro_batches(llama):
    model, tokenizer = llama
    outcomes = []
    for budget in (1, 40, 100, 65536):
        torch.manual_seed(4)
        rollout, texts = sample(model, tokenizer, tokens_per_generation=budget)
        outcomes.append((rollout, texts, torch.rand(1).item()))
    rollout, texts, following = outcomes[0]
    assert len(set(texts)) > 6
    for other, other_texts, other_following in outcomes[1:]:
        assert (other_texts, other_following) == (texts, following)
        assert torch.equal(other.token_ids, rollout.token_ids)
        assert torch.equal(other.mask, rollout.mask)
        torch.testing.assert_close(other.logprobs, rollout.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 30, 70, 1000])
def test_a_micro_batch_holds_as_many_tokens_as_allowed_and_at_least_a_sequence(
    llama, monkeypatch, budget
):
    model, tokenizer = llama
    seen, generate = [], model.generate
    monkeypatch.setattr(
        model, "generate", lambda **inputs: seen.append(inputs["input_ids"]) or generate(**inputs)
    )
    sample(model, tokenizer, tokens_per_generation=budget)
    sizes = [(len(ids), ids.shape[1] + 6) for ids in seen]
    assert sum(count for count, _ in sizes) == 12
    assert all(count == 1 or count * length <= budget for count, length in sizes)
    assert len(sizes) == {1: 12, 30: 7, 70: 4, 1000: 1}[budget]


def test_real_and_padded_tokens_are_counted(llama):
    model, tokenizer = llama
    config = GrpoConfig(max_new_tokens=6, tokens_per_generation=40)
    sampler = make_sampler(model, tokenizer, config)
    torch.manual_seed(0)
    rollout, _ = sampler.sample(prompts_of(tokenizer), 4)
    real = 4 * sum(map(len, rollout.prompts)) + int(rollout.mask.sum())
    assert sampler.tokens.real == real
    assert sampler.tokens.padded >= real
    few = sampler.tokens.padded
    make_all = make_sampler(model, tokenizer, GrpoConfig(max_new_tokens=6))
    torch.manual_seed(0)
    make_all.sample(prompts_of(tokenizer), 4)
    assert make_all.tokens.real == real
    assert make_all.tokens.padded > few


# ---------------------------------------------------------------- the rollout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["transformers", "continuous"])
def test_logprobs_equal_the_ones_of_the_model(kind, engine):
    model, tokenizer = tiny(kind)
    for temperature in (0.6, 1.0):
        torch.manual_seed(5)
        rollout, _ = sample(
            model, tokenizer, max_new_tokens=12, temperature=temperature, sampler=engine
        )
        expected = model_logprobs(model, rollout, temperature)
        assert rollout.logprobs.dtype == torch.float32
        assert rollout.mask.sum() > 60
        torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-5)
        assert (rollout.logprobs[~rollout.mask] == 0).all()


@pytest.mark.parametrize("engine", ["transformers", "continuous"])
def test_completions_end_at_the_end_token_and_are_padded(llama, engine):
    model, tokenizer = llama
    torch.manual_seed(0)
    rollout, texts = sample(model, tokenizer, 64, sampler=engine, temperature=2.0)
    assert rollout.prompts == [prompt.token_ids for prompt in prompts_of(tokenizer)]
    assert rollout.prompt_of.tolist() == [k for k in range(3) for _ in range(64)]
    assert 0 < rollout.truncated.sum() < len(texts)
    rows = zip(rollout.token_ids, rollout.mask, rollout.truncated, texts, strict=True)
    for ids, mask, truncated, text in rows:
        n = int(mask.sum())
        assert mask[:n].all()
        assert (ids[n:] == tokenizer.pad_token_id).all()
        assert (ids[: n - 1] != tokenizer.eos_token_id).all()
        assert truncated == (ids[n - 1] != tokenizer.eos_token_id)
        assert n == 6 or not truncated
        assert tokenizer.decode(ids[:n], skip_special_tokens=True) == text


def test_an_end_at_the_limit_is_not_truncated(llama):
    model, tokenizer = llama
    torch.manual_seed(0)
    rollout, _ = sample(model, tokenizer, 300, max_new_tokens=1, temperature=3.0)
    ended = rollout.token_ids[:, 0] == tokenizer.eos_token_id
    assert ended.any()
    assert torch.equal(rollout.truncated, ~ended)


@pytest.mark.parametrize("engine", ["transformers", "continuous"])
def test_equal_generators_give_equal_samples(llama, engine):
    model, tokenizer = llama
    outcomes = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        _, texts = sample(model, tokenizer, sampler=engine)
        outcomes.append((texts, torch.rand(3).tolist()))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] != outcomes[2][0]
    assert outcomes[0][1] != outcomes[2][1]


def test_continuous_batching_draws_one_number_of_the_run(llama):
    """Whatever it samples: it seeds the generators of the process, which are put back."""
    model, tokenizer = llama
    following = []
    for group_size in (0, 1, 5):
        torch.manual_seed(7)
        if group_size:
            sample(model, tokenizer, group_size, sampler="continuous")
        else:
            torch.randint(2**31, (1,))
        following.append(torch.rand(3).tolist())
    assert following[0] == following[1] == following[2]


@pytest.mark.parametrize("engine", ["transformers", "continuous"])
def test_greedy_depends_neither_on_padding_nor_on_the_generator(llama, engine):
    model, tokenizer = llama
    sampler = make_sampler(
        model, tokenizer, GrpoConfig(max_new_tokens=6, temperature=0.3, sampler=engine)
    )
    state = torch.get_rng_state()
    together, lengths = sampler.greedy(prompts_of(tokenizer))
    assert torch.equal(state, torch.get_rng_state())
    alone = [sampler.greedy([prompt]) for prompt in prompts_of(tokenizer)]
    assert together == [text for (text,), _ in alone]
    assert lengths == [length for _, (length,) in alone]
    assert all(len(text) <= n <= 6 for text, n in zip(together, lengths, strict=True))
    ids = list(prompts_of(tokenizer)[1].token_ids)
    for character in together[1]:
        with torch.no_grad():
            likeliest = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        assert tokenizer.decode([likeliest]) == character
        ids.append(likeliest)
