"""The CUDA operators: what rows of the table and drawn cases rarely hit."""

import itertools

import pytest
import torch

import fastrl
from fastrl.contract import LEVELS, SURROGATES
from fastrl.ops._autograd import known_gradient
from tests.calls.case import Case
from tests.calls.combined import assert_value
from tests.gpu.device.pretended import Pretended, execute

pytestmark = [pytest.mark.kernels_alone, pytest.mark.not_on("triton")]  # which has others
KL = {"kl_coef": 0.1, "kl_clamp": 10.0, "entropy_coef": 0.01}


@pytest.fixture(autouse=True)
def on_gpu(backend, monkeypatch):
    monkeypatch.setattr(known_gradient, "_on_gpu", lambda factor: True)  # scales by a kernel


def test_a_temperature_near_0_is_refused():
    logits, ids = torch.tensor([[-601.0, -600.0], [-1.0, 3.0]]), torch.zeros(2, dtype=torch.long)
    stats = fastrl.token_stats(
        logits, ids, outputs=("logprobs", "entropy"), temperature=1e-6, backend="cuda"
    )
    assert stats.logprobs.tolist() == [-1e6, -4e6]
    assert stats.entropy.tolist() == [0, 0]
    with pytest.raises(ValueError, match="temperature must be at least 1e-06 on backend 'cuda'"):
        fastrl.token_logprobs(logits, ids, temperature=9e-7, backend="cuda")
    with pytest.raises(ValueError, match="temperature must be at least 6e-05"):
        fastrl.token_logprobs(logits, ids, temperature=5e-5, logit_softcap=30.0, backend="cuda")
    hidden, weight = torch.randn(1, 2, 8), torch.randn(2, 8)
    head, kept = (hidden, weight, ids[None]), fastrl.KeptTokens.from_lists([[0, 1], []])
    given = {"temperature": 9e-7, "backend": "cuda"}
    for call in (
        lambda: fastrl.linear_policy_loss(*head, torch.ones(1), torch.ones(1, 2), **given),
        lambda: fastrl.linear_token_logprobs(*head, **given),
        lambda: fastrl.token_logprobs(logits, ids, kept=kept, **given),
    ):
        with pytest.raises(ValueError, match=r"^temperature must be at least"):
            call()


#: Chunks are of 4,096 tokens; whole runs of a thread are masked.
OF_CHUNKS = [
    Case("gae", **shape, parameters={"gamma": 1.0, "lam": 0.99, **ends})
    for shape in (
        {"sequences": 1, "tokens": 13_000, "mask": "holes"},
        {"sequences": 3, "tokens": 4300, "mask": "ragged"},
        {"sequences": 40, "tokens": 325, "mask": "ragged"},
    )
    for ends in (
        {"truncated": 0.001},
        {"bootstrap": "sequence"},
        {"truncated": 0.001, "bootstrap": "token"},
    )
]
#: A NaN stays in its sequence.
BROKEN = [
    Case("gae", sequences=4, tokens=300, layout=layout, features=("nan-rewards",))
    for layout in ("padded", "cut")
]
#: Constants per sequence, some of which are empty or within a quad; many blocks and clusters.
LOSS = {"old": "near", "ref": "near", "entropy": True, "mask": "holes"}
BY_SEQUENCE = [
    Case(
        "policy_loss", **LOSS, **shape, objective=objective, advantages="sequence",
        policy_weights=weights, fields={**KL, "level": level},
    )
    for shape in (
        {"sequences": 12, "tokens": 40, "layout": "cut"},
        {"sequences": 2, "tokens": 1500, "token_layout": "odd"},
        {"sequences": 1, "tokens": 9000, "token_layout": "odd"},
    )
    for objective, level in (("ppo", "token"), ("ppo", "sequence"), ("ppo", "sequence-token"))
    for weights in ("sequence", "token")
]  # fmt: skip
ENDS = [("logprob-inf", "old-inf"), ("both-inf", "ref-both-inf"), ("inf-advantages",)]
FAR = [
    Case(
        "policy_loss", sequences=15, tokens=tokens, old="huge", ref="bounds", features=features,
        fields={"surrogate": surrogate, "level": level, "aggregation": "token-sum"},
    )
    for surrogate, level in itertools.product(SURROGATES, LEVELS)
    if (level == "token" and surrogate != "gmpo") or surrogate == "ppo_clip"
    for tokens, features in zip((1, 3, 3), ENDS, strict=True)
]  # fmt: skip


@pytest.mark.parametrize(
    "cases", [OF_CHUNKS, BROKEN, BY_SEQUENCE, FAR], ids=["chunks", "nan", "sequences", "far"]
)
def test_values_and_gradients_are_those_of_the_oracle(cases):
    for case in cases:
        assert_value("cuda", case.changed(twice=True))


@pytest.mark.parametrize(("groups", "size"), [(9, 4), (2, 140), (5, 1), (150, 2)])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_groups_by_id_have_the_bits_of_consecutive_ones(scale, groups, size):
    """By a single block, by a block for each group, and by many blocks."""
    rewards = torch.randn(groups, size) * 10.0 ** torch.randint(-2, 3, (groups, 1)) + 1e3
    rewards[1, 0] = float("nan")  # stays in its group, and is left out of the batch
    rewards = rewards.flatten()
    place = torch.randperm(groups * size)
    names = torch.randint(-(2**62), 2**62, (groups,))  # some of which share an entry
    ids = names.repeat_interleave(size)[place]
    given = {"scale": scale, "singleton": "zero"}
    consecutive = fastrl.group_advantages(rewards, group_size=size, **given, backend="cuda")
    found = fastrl.group_advantages(rewards[place], group_ids=ids, **given, backend="cuda")
    exact = fastrl.group_advantages(rewards.double(), group_size=size, **given, backend="reference")
    for one, other, want in zip(found, consecutive, exact, strict=True):
        assert torch.equal(one.nan_to_num(7), other[place].nan_to_num(7))
        torch.testing.assert_close(other.to(want), want, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_rewards_beside_large_ones_keep_their_digits():
    rewards = torch.tensor([-1e3, 1e3, 1e-3, 2e-3])
    given = {"group_size": 4, "scale": "none"}
    found = fastrl.group_advantages(rewards, **given, backend="cuda").advantages.double()
    exact = fastrl.group_advantages(rewards.double(), **given, backend="reference").advantages
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_excluded_token_is_the_most_likely_only_among_excluded_ones(dtype, softcap):
    logits = torch.full((1, 3, 1000), -torch.inf, dtype=dtype)
    logits[0, 1, 7], logits[0, 2] = -1e4, torch.nan
    ids, outputs = torch.full((1, 3), 5), ("is_top1",)
    stats = fastrl.token_stats(logits, ids, outputs=outputs, logit_softcap=softcap, backend="cuda")
    assert stats.is_top1.tolist() == [[True, False, False]]


def test_nan_at_a_token_without_slope_reaches_the_gradients(monkeypatch):
    """Of hidden states and head, where a chunk takes one kernel and products of 16 bits."""
    execute("cuda", monkeypatch.setitem, monkeypatch.setattr)
    options = {"sequences": 4, "tokens": 25, "mask": "holes", "hidden": 24, "vocabulary": 311}
    broken = {"bias": True, "lora": 3, "features": ("nan-row", "zero-advantages")}
    with Pretended():
        for dtype in ("float32", "bfloat16"):
            case = Case("linear_policy_loss", **options, **broken, old="near", dtype=dtype)
            assert_value("cuda", case, "cuda")


def test_a_token_is_added_to_the_sum_of_the_others():
    """It may be far ahead; at a high temperature no logit in float16 counts as nothing."""
    logits = torch.randn(3, 5000)
    ids, lead = torch.tensor([0, 2500, 4999]), torch.tensor([20.0, 40.0, 60.0])
    logits[range(3), ids] = logits.amax(1) + lead
    below = logits.double() - logits.double().amax(1, keepdim=True)
    others = below.scatter(1, ids[:, None], -torch.inf).exp().sum(1)
    found = -fastrl.token_logprobs(logits, ids, backend="cuda")
    torch.testing.assert_close(found.double(), others.log1p(), rtol=1e-5, atol=0)
    flat = torch.randn(3, 16, dtype=torch.float16)  # two vectors
    found = fastrl.token_logprobs(flat, ids % 16, temperature=1e6, backend="cuda")
    torch.testing.assert_close(found, torch.full((3,), 1 / 16).log(), rtol=1e-5, atol=0)
