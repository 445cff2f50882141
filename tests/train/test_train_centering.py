"""`--score_centering`: the sampler's most likely tokens, and what the loops do with them."""

from types import SimpleNamespace as Output

import pytest
import torch

pytest.importorskip("transformers")


from fastrl import TopKLogprobs
from fastrl.train import vllm_sampler
from fastrl.train.config import GrpoConfig
from fastrl.train.loading import character_tokenizer
from fastrl.train.rollout import concatenate
from fastrl.train.sampling import Sampler
from tests.train.packed import TEXTS, padded, plain, prompts_of, sample
from tests.train.runs import rows, run

HERE, V = __name__, len(character_tokenizer())
CENTERED = {"score_centering": 6, "objective": "reinforce"}
GIVEN: list = []  # prompts and completions of `biased`


def sampled(tiny, texts=TEXTS, **options):
    return sample(*tiny, texts=texts, **{"temperature": 1.3, **CENTERED, **options})[0]


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 6), ({"top_k": 4}, 4), ({"top_p": 0.8}, 6), ({"score_centering": 500}, V)],
    ids=str,
)
def test_they_are_of_the_full_softmax(tiny, options, most):
    """At the temperature, over the kept tokens, also in micro-batches of a few sequences."""
    rollout = sampled(tiny, tokens_per_generation=60, **options)
    logits, _ = padded(plain(tiny[0]), rollout)
    if rollout.kept is not None:
        where = torch.arange(rollout.mask.numel()).repeat_interleave(rollout.kept.counts())
        outside = torch.ones(rollout.mask.numel(), V, dtype=torch.bool)
        outside[where, rollout.kept.token_ids.long()] = False
        logits = logits.masked_fill(outside.view_as(logits), -torch.inf)
    ids, logprobs = rollout.top_logprobs
    assert (ids[~rollout.mask] == -1).all()
    for own, found, row in zip(
        ids[rollout.mask].long(),
        logprobs[rollout.mask].double(),
        (logits / 1.3).log_softmax(-1)[rollout.mask],
        strict=True,
    ):
        count = min(most, int((row > -torch.inf).sum()))
        assert len(set(own[:count].tolist())) == count
        assert (own[count:] == -1).all()
        largest = row.topk(count).values  # whose order equal tokens may change
        torch.testing.assert_close(found[:count], largest, rtol=0, atol=1e-5)
        torch.testing.assert_close(row[own[:count]], largest, rtol=0, atol=1e-5)


def test_they_follow_their_rows(tiny):
    one, two = sampled(tiny), sampled(tiny, TEXTS[:1], score_centering=3, stop=("1", "2", "3"))
    none = sampled(tiny, TEXTS[:1], score_centering=None)
    assert none.top_logprobs is None
    both = concatenate([one, two, none]).rows(torch.tensor([13, 0, 17, 5]))
    for place, (part, row) in enumerate([(two, 1), (one, 0), (none, 1), (one, 5)]):
        ids, logprobs = (x[place] for x in both.top_logprobs)
        assert ids.shape == (both.mask.shape[1], 6)
        if part.top_logprobs is not None:
            for found, given in zip((ids, logprobs), part.top_logprobs, strict=True):
                assert torch.equal(found[: given.shape[1], : given.shape[2]], given[row])
            ids[: given.shape[1], : given.shape[2]] = -1
        assert (ids == -1).all()
    greedy = Sampler(*tiny, GrpoConfig(**CENTERED)).greedy(prompts_of(tiny[1], TEXTS))
    assert greedy[0].top_logprobs is None


@pytest.mark.parametrize(("loop", "minibatches"), [("grpo", 1), ("grpo", 4), ("ppo", 1)])
def test_metrics_say_how_far_the_sampler_is(small, loop, minibatches):
    """It is the policy itself, until the first optimizer step."""
    settings = {"score_centering": 6, "minibatches": minibatches, "learning_rate": 1e-2}
    settings |= {"objective": "reinforce", "warmup_steps": 0} if loop == "grpo" else {}
    for row in rows(run(loop, small, **settings, steps=2).directory)[1:]:
        assert 0.06 < row["centering_mass"] < 1
        assert row["zero_weight_fraction"] == 0
        assert (row["kl_sampler"] < 1e-9) == (minibatches == 1)
        assert (abs(row["head_kl"]) < 1e-6) == (minibatches == 1)


@pytest.mark.parametrize(
    ("top", "message"),
    [
        (None, "rollout_top_k is needed"),
        ([[1]], "rollout_top_k must be TopKLogprobs or None, got list"),
        (TopKLogprobs.from_lists([[1]] * 99, [[-1.0]] * 99), r"must have \d rows .* got 99"),
        (TopKLogprobs(torch.tensor([[V]]), torch.zeros(1, 1)), rf"must lie in \[0, {V}\)"),
        (TopKLogprobs(torch.tensor([[1, 1]]), -torch.ones(1, 2)), "must not repeat an id"),
        (TopKLogprobs(torch.tensor([[1]]), torch.ones(1, 1)), "must be log-probabilities"),
    ],
)
def test_without_the_right_tokens_a_run_is_refused(tiny, own, top, message):
    def given(prompts, group_size, complete, tokenizer):
        asked = [prompt.token_ids for prompt in prompts for _ in range(group_size)]
        return [one._replace(top_logprobs=top) for one in complete(asked)]

    own(given=given)
    with pytest.raises(ValueError, match=rf"sampler must return .*top_logprobs.* {message}"):
        sampled(tiny, sampler="own:given", max_new_tokens=1)


def test_vllm_gives_them_without_the_sampled_token():
    logprobs = [{7: Output(logprob=-3.0, rank=9), 2: Output(logprob=-0.1, rank=1)}]
    answer = Output(token_ids=[7], logprobs=logprobs, finish_reason="stop")
    one = vllm_sampler._completion(answer, keeps=False, top=1)
    assert (one.top_logprobs.token_ids.tolist(), one.logprobs.tolist()) == ([[2]], [-3.0])
    assert vllm_sampler._completion(answer, keeps=False).top_logprobs is None
