"""Sampling with top_p, top_k and min_p: what is kept is recorded, replayed, or the run refused."""

import sys
from dataclasses import make_dataclass, replace
from types import SimpleNamespace as Output

import pytest
import torch

pytest.importorskip("transformers")

from fastrl import KeptTokens
from fastrl.train import vllm_sampler
from fastrl.train.config import GrpoConfig
from fastrl.train.endings import Endings
from fastrl.train.loading import character_tokenizer
from fastrl.train.metrics import lengths
from fastrl.train.own_completions import checked_completion
from fastrl.train.policy import completion_logprobs
from fastrl.train.rollout import Completion, TokenCount, concatenate, rollout_of
from fastrl.train.sampling import Sampler
from tests.train.packed import TEXTS, padded, plain, prompts_of, sample
from tests.train.runs import rows, run

KEEPS = {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.95, "top_k": 30, "min_p": 0.02}


def kept_by_hand(logprobs, top_p=1.0, top_k=None, min_p=0.0):
    """Whether each token is kept, for one distribution."""
    order = logprobs.argsort(descending=True)
    p = logprobs[order].exp()
    kept = torch.ones(len(p), dtype=torch.bool)
    if top_k is not None:
        kept[top_k:] = False
    p = torch.where(kept, p, 0.0) / p[kept].sum()
    kept &= p.cumsum(0) - p < top_p
    p = torch.where(kept, p, 0.0) / p[kept].sum()
    kept &= p >= min_p * p[0]
    result = torch.zeros_like(kept)
    result[order] = kept
    return result


@pytest.mark.parametrize("keeps", KEEPS, ids=str)
def test_log_probabilities_are_of_the_tokens_that_were_kept(tiny, keeps):
    options = {"temperature": 1.3, **keeps}
    rollout, config = sample(*tiny, **options)[0], GrpoConfig(**options)
    logits, _ = padded(plain(tiny[0]), rollout)
    full = (logits.double() / 1.3).log_softmax(-1)
    sets = rollout.kept.token_ids.long().split(rollout.kept.counts().tolist())
    for row, tokens in enumerate(sets):
        i, j = divmod(row, rollout.mask.shape[1])
        if not rollout.mask[i, j]:
            assert len(tokens) == 0
            continue
        by_hand = kept_by_hand(full[i, j], **keeps)
        # a token at the edge may be on either side by the rounding of float32
        assert (by_hand.nonzero()[:, 0].tolist() == sorted(tokens.tolist())) or abs(
            int(by_hand.sum()) - len(tokens)
        ) <= 1
        own = rollout.token_ids[i, j]
        assert own in tokens
        expected = full[i, j, own] - full[i, j, tokens].logsumexp(0)
        torch.testing.assert_close(rollout.logprobs[i, j].double(), expected, rtol=0, atol=1e-5)
    for loss in ("linear", "logits"):
        replayed = completion_logprobs(
            tiny[0], rollout, torch.arange(len(rollout.mask)), replace(config, loss=loss)
        )
        torch.testing.assert_close(replayed, rollout.logprobs, rtol=0, atol=1e-5)
    found = lengths(rollout, TokenCount(1, 1))
    assert found["kept_lacking"] == 0
    assert found["kept_tokens"] == pytest.approx(len(rollout.kept.token_ids) / rollout.mask.sum())


def test_sets_follow_their_rows(tiny):
    one, _ = sample(*tiny, top_p=0.8)
    two, _ = sample(*tiny, 2, TEXTS[:1], top_k=3, stop=("1", "2", "3"))
    whole, _ = sample(*tiny, 2, TEXTS[:1])
    assert whole.kept is None
    both = concatenate([one, two, whole])
    order = torch.tensor([13, 0, 15, 5])
    rollout = both.rows(order)
    length = both.mask.shape[1]
    sets = rollout.kept.token_ids.split(rollout.kept.counts().tolist())
    for place, (part, row) in enumerate([(two, 1), (one, 0), (whole, 1), (one, 5)]):
        for token in range(length):
            own = []
            if part.kept is not None and token < part.mask.shape[1]:
                own = part.kept.take(torch.tensor([row * part.mask.shape[1] + token])).token_ids
            assert sets[place * length + token].tolist() == list(own)


def test_sets_of_completions_of_other_lengths(tiny):
    """Those of two rollouts together, whose tokens and padding their sets do not have."""
    parts = []
    for sets in ([[[3, 4], [5]], [[6]]], [[[7], [8, 9], [5], [2]], [[1], [1], [1]]]):
        completions = [
            Completion(
                torch.tensor([one[0] for one in of_tokens]),
                torch.full((len(of_tokens),), -1.0),
                ended=True,
                sampled=torch.arange(len(of_tokens)) != 2,  # which a tool wrote
                kept=KeptTokens.from_lists(of_tokens),
            )
            for of_tokens in sets
        ]
        parts.append(rollout_of(prompts_of(tiny[1], TEXTS[:1]), completions, torch.device("cpu")))
    both = concatenate(parts)
    assert both.kept.counts().view(4, 4).tolist() == [
        [2, 1, 0, 0], [1, 0, 0, 0], [1, 2, 1, 1], [1, 1, 1, 0],
    ]  # fmt: skip
    assert both.kept.token_ids.tolist() == [3, 4, 5, 6, 7, 8, 9, 5, 2, 1, 1, 1]
    both.token_ids[both.mask.logical_not()] = 11  # in no set, but nobody sampled it
    assert lengths(both, TokenCount(1, 1))["kept_lacking"] == 0
    both.token_ids[0, 0] = 11
    assert lengths(both, TokenCount(1, 1))["kept_lacking"] == pytest.approx(1 / 8)


@pytest.mark.parametrize("loop", ["grpo", "ppo"])
def test_on_policy_the_ratio_is_one(small, tmp_path, loop):
    settings = {"steps": 2, "epochs": 2, "minibatches": 1, "learning_rate": 1e-12}
    run(loop, {**small, **settings}, top_p=0.7, out=str(tmp_path / "run"))
    for row in rows(tmp_path / "run"):
        if "ratio_max" in row:
            assert row["ratio_max"] == pytest.approx(1, abs=1e-5)
            assert row["kl_sampler"] < 1e-9
            assert 1 <= row["kept_tokens"] < len(character_tokenizer())


BIASED = r"kept tokens .* every ratio is biased"
REFUSED = {
    "none": (lambda one: None, BIASED),
    "one empty": (lambda one: [ids.tolist() * (i > 0) for i, ids in enumerate(sets(one))], BIASED),
    "a list": (lambda one: KeptTokens([[1]], [0]), "kept tokens that fit: 'list' object"),
    "another object": (lambda one: {}, "kept tokens that fit: kept must be KeptTokens"),
    "too many": (lambda one: [[1]] * 99, r"kept.offsets must have shape .*, got \(100,\)"),
    "falling": (lambda one: one.kept._replace(offsets=-one.kept.offsets), "kept.offsets must rise"),
    "outside": (lambda one: [[9999]] * len(one.token_ids), r"kept.token_ids must lie in \[0, "),
    "twice": (lambda one: [[1, 1]] * len(one.token_ids), "must not repeat an id"),
    "of others": (
        lambda one: [[1]] * len(one.token_ids),
        r"got \d of \d sampled tokens outside their set",
    ),
}


def sets(one):
    return one.kept.token_ids.split(one.kept.counts().tolist())


@pytest.fixture
def gives(own):
    """Makes a sampler that gives what a function has of the completions of the loops' own."""

    def make(given):
        def sampler(prompts, group_size, complete, tokenizer):
            asked = [prompt.token_ids for prompt in prompts for _ in range(group_size)]
            return [one._replace(kept=as_sets(given(one))) for one in complete(asked)]

        own(sampler=sampler)
        return "own:sampler"

    return make


def as_sets(kept):
    return KeptTokens.from_lists(kept) if isinstance(kept, list) else kept


@pytest.mark.parametrize("what", REFUSED)
def test_without_the_right_sets_a_run_is_refused(tiny, gives, what):
    given, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        sample(*tiny, sampler=gives(given), top_p=0.9)


def test_what_needs_no_sets_is_not_refused(tiny, gives):
    none = gives(lambda one: None)
    sample(*tiny, sampler=none)
    greedy = Sampler(*tiny, GrpoConfig(sampler=none, top_p=0.9)).greedy  # replays nothing
    greedy(prompts_of(tiny[1], TEXTS))
    sample(*tiny, sampler=gives(lambda one: one.kept), top_p=0.9)


def test_what_a_tool_wrote_needs_no_set(tiny):
    """Its tokens are of no sampler, and no set needs to have them."""
    model, _ = tiny
    config = GrpoConfig(top_p=0.9)
    one = Output(
        token_ids=[4, 5, 6, 6, 7],
        logprobs=[-1.0, 0.0, 0.0, 0.0, -1.0],
        sampled=[True, False, False, False, True],
        ended=True,
        kept=KeptTokens.from_lists([[4], [], [9], [9], [7, 8]]),
    )
    found = checked_completion(one, [1, 2], model, config, greedy=False)
    assert all(map(torch.equal, found.kept, one.kept))
    one.sampled = None
    with pytest.raises(ValueError, match=BIASED):
        checked_completion(one, [1, 2], model, config, greedy=False)
    one.sampled, one.kept = [True] * 5, KeptTokens.from_lists([[4], [5], [9], [9], [7]])
    with pytest.raises(ValueError, match="got 2 of 5 sampled tokens outside their set"):
        checked_completion(one, [1, 2], model, config, greedy=False)


def test_vllm_must_tell_what_it_keeps(monkeypatch):
    old = make_dataclass("EngineArgs", ["model"])
    monkeypatch.setitem(sys.modules, "vllm", Output(EngineArgs=old))
    with pytest.raises(ValueError, match="top_p, top_k and min_p must be left at their defaults"):
        vllm_sampler._check_replay(GrpoConfig(top_p=0.9), "cuda")
    new = make_dataclass("EngineArgs", ["return_sampling_mask"])
    monkeypatch.setitem(sys.modules, "vllm", Output(EngineArgs=new))
    with pytest.raises(ValueError, match="top_k must be set with top_p or min_p in vLLM"):
        vllm_sampler._check_replay(GrpoConfig(top_p=0.9), "cuda")
    vllm_sampler._check_replay(GrpoConfig(top_p=0.9, top_k=50), "cuda")
    with pytest.raises(ValueError, match="with vLLM on a CPU"):
        vllm_sampler._check_replay(GrpoConfig(top_p=0.9, top_k=50), "cpu")
    answer = answered([[5, 9], [6]])
    assert vllm_sampler._completion(answer, keeps=True).kept.counts().tolist() == [2, 1]
    assert vllm_sampler._completion(answer, keeps=False).kept is None
    with pytest.raises(RuntimeError, match="vLLM did not return the tokens that it kept"):
        vllm_sampler._completion(answered(None), keeps=True)
    nothing = Output(token_ids=[], logprobs=[], finish_reason="stop", sampling_mask=None)
    assert vllm_sampler._completion(nothing, keeps=True).kept.counts().tolist() == []


def answered(sets):
    """What vLLM answers."""
    return Output(
        token_ids=[5, 6],
        logprobs=[{5: Output(logprob=-0.5)}, {6: Output(logprob=0.0)}],
        finish_reason="stop",
        sampling_mask=None if sets is None else Output(token_ids=sets),
    )


def test_greedy_is_top_1_in_a_vllm_that_returns_sets(tiny, monkeypatch):
    """It refuses a temperature of 0, and requests without top_k."""
    asked = []

    def outputs(prompts, parameters):
        asked.append(parameters[0])
        return [Output(outputs=[answered([[5], [6]])])]

    monkeypatch.setitem(sys.modules, "vllm", Output(SamplingParams=lambda **given: Output(**given)))
    engine, (model, tokenizer) = object.__new__(vllm_sampler.VllmEngine), tiny
    config = GrpoConfig(temperature=1.3, top_p=0.9, top_k=50)
    engine._config, engine._endings = config, Endings(model, tokenizer, config)
    engine._tokens, engine._outputs, engine._check = 0, outputs, lambda *given: None
    engine._top = 1
    engine.complete([[1, 2]], greedy=False)
    engine.complete([[1, 2]], greedy=True)
    found = [(one.temperature, one.top_k, one.logprobs) for one in asked]
    assert found == [(1.3, 50, 1), (1.0, 1, 0)]
    assert asked[0].top_p == 0.9
