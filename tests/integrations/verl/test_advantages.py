"""verl's registered advantage estimators on fastrl, against its formulas and verl itself."""

import pytest
import torch

from fastrl.integrations.verl import _ESTIMATORS
from tests.integrations.compared import close
from tests.integrations.verl.cases import ESTIMATORS, GROUPED, OURS, batch, estimate

#: those that do not whiten
EXACT = [x for x in GROUPED if x not in ("gdpo", "reinforce_plus_plus_baseline")]


def same(case, theirs, data, **changes):
    """Equal at active tokens; ours is 0 at the others."""
    found, expected = (estimate(n, case, data, **changes) for n in (OURS, theirs))
    bound = 1e-6 if data.rewards.dtype == torch.float64 else 1e-5
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == data.rewards.dtype
        close(a[data.mask != 0], b[data.mask != 0], bound)
        assert (a[data.mask == 0] == 0).all()
    return found[0]


@pytest.mark.parametrize("kind", ["floats", "integers", "fractions", "twos", "single precision"])
@pytest.mark.parametrize("case", ESTIMATORS)
def test_values(theirs, case, kind):
    single = kind == "single precision"
    dtype = torch.float32 if single else torch.float64
    same(case, theirs, batch("floats" if single else kind, dtype, B=9))


def test_every_estimator_is_compared():
    tested = {f"compute_{name}_outcome_advantage" for name, _ in ESTIMATORS.values()}
    assert {function.__name__ for function in _ESTIMATORS} <= tested


@pytest.mark.parametrize("case", ["grpo_passk", "grpo_passk, not by std"])
def test_the_best_of_a_group_with_ties(theirs, case):
    data = batch(dtype=torch.float64, B=9)
    data.rewards = data.rewards.round()
    data.rewards[[1, 4, 6, 8]] = torch.tensor([3.0, 1.0, 3.0, 0.0])[:, None].double() / 9
    assert (same(case, theirs, data)[[1, 4, 6, 8]] == 0).all()


@pytest.mark.parametrize("weights", [None, [0.5, 2.0]])
@pytest.mark.parametrize("by_std", [True, False])
def test_the_rewards_of_gdpo(theirs, weights, by_std):
    data = batch("floats", torch.float64, B=9)
    parts = {"format": data.rewards[:, 0] > 0, "answer": 100 * data.rewards[:, 1]}
    config = {"gdpo_reward_keys": ["format", "answer"], "gdpo_reward_weights": weights}
    a, b = (
        estimate(
            n,
            "gdpo",
            data,
            config=config,
            non_tensor_batch={key: x.float().numpy().astype(object) for key, x in parts.items()},
            batch={"prompts": torch.ones(9, 2), "attention_mask": torch.ones(9, 11).long()},
            norm_adv_by_std_in_grpo=by_std,
        )[0]
        for n in (OURS, theirs)
    )
    close(a, b)


@pytest.mark.parametrize(
    ("case", "reward"),
    [(x, 0.0) for x in GROUPED] + [(x, 0.1) for x in EXACT],  # which gives 7e-3 in verl
)
def test_equal_rewards_give_exactly_zero(case, reward):
    data = batch(B=9)
    data.rewards = torch.full((9, 9), reward) / 9
    assert (estimate(OURS, case, data, index=["a", "b", "c"] * 3)[0] == 0).all()


def test_a_half_masked_token_has_half_the_advantage():
    data = batch(B=2, T=2)
    data.rewards, data.mask = torch.eye(2).flip(0) * 1.0, torch.tensor([[1.0, 0.5], [0.25, 0.0]])
    data.rewards[1] = 0.0
    advantages, _ = estimate(OURS, "dr. grpo", data, index=["a", "a"])
    assert advantages.tolist() == [[0.5, 0.25], [-0.125, 0.0]]


def test_rewards_that_differ_in_the_fifth_digit_keep_their_spread():
    data = batch(B=4, T=1)
    data.rewards, data.mask = torch.tensor([[1.0], [1.00001], [2.0], [2.00001]]), torch.ones(4, 1)
    found, _ = estimate(OURS, "grpo", data, index=["a", "a", "b", "b"])
    for pair in (slice(0, 2), slice(2, 4)):
        gap = (data.rewards[pair][1] - data.rewards[pair][0]).double()
        expected = gap / 2 / (gap / 2**0.5 + 1e-6)
        close(found[pair, 0], torch.cat([-expected, expected]))


@pytest.mark.parametrize("case", ["rloo", "opo", "grpo_passk", "grpo_passk, not by std"])
def test_a_nan_reward_stays_in_its_group(case):
    data = batch("floats", B=9)
    data.mask[:, 0] = 1.0
    data.rewards[2, 0] = float("nan")
    index = ["b", "a", "b", "a", "a", "c", "a", "c", "a"]
    found, _ = estimate(OURS, case, data, index=index)
    assert found[:, 0].isnan().tolist() == [x == "b" for x in index]


@pytest.mark.parametrize("kind", ["floats", "integers"])
@pytest.mark.parametrize(
    "case", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"]
)
def test_a_single_token_cannot_be_whitened(case, kind):
    data = batch(kind, B=9)
    data.mask = torch.zeros_like(data.mask)
    data.mask[2, 3] = 1
    assert (estimate(OURS, case, data)[0] == 0).all()
