"""verl's registered advantage estimators on fastrl, against its formulas and verl itself."""

import types

import pytest
import torch

from fastrl.integrations.verl import _ESTIMATORS, compute_gae_advantage_return
from tests.support import verl_estimator_formulas
from tests.support.importable import importable
from tests.support.verl_cases import CORE, Config, batch

OURS = types.SimpleNamespace(**{function.__name__: function for function in _ESTIMATORS})
INDEX = ["b", "a", "b", "alone", "a", "c", "a", "c", "a"]
ALGORITHM = Config(gamma=0.9, norm_adv_by_std_in_grpo=True)
#: name -> its arguments besides rewards and mask
GROUPED = {
    "rloo": {},
    "rloo_vectorized": {},
    "opo": {},
    "gpg": {"f_norm": 2.0},
    "reinforce_plus_plus_baseline": {},
    "grpo_passk": {"config": ALGORITHM},
    "gdpo": {},
}
ALONE = {"remax": {"reward_baselines": torch.linspace(-1, 1, 9).double()}}
ALONE["reinforce_plus_plus"] = {"config": ALGORITHM}
ALL = GROUPED | ALONE


@pytest.fixture(params=["transcribed", "installed"])
def theirs(request):
    """A namespace with verl's functions: our transcription, or the package."""
    if request.param == "transcribed":
        return verl_estimator_formulas
    return importable(CORE) or pytest.skip("needs verl itself")


def data(kind="floats"):
    """Nine responses in float64 with holes in their masks; the second one is empty."""
    found = batch(B=9)
    torch.manual_seed(1)
    factor = {
        "floats": torch.tensor(1.0),
        "integers": torch.tensor(1),
        "fractions": torch.rand(9, 9).double() + 0.1,
        "doubles": torch.tensor(2),
    }[kind]
    return found.rewards.double(), found.mask * factor


def estimate(namespace, name, rewards, mask, **changes):
    options = {**ALL[name], **changes}
    if name in GROUPED:
        index = ["b" if x == "alone" and name == "grpo_passk" else x for x in INDEX]
        options.setdefault("index", as_array(index))
    function = getattr(namespace, f"compute_{name}_outcome_advantage")
    return function(token_level_rewards=rewards, response_mask=mask, **options)


def as_array(names):
    return pytest.importorskip("numpy").array(names, dtype=object)


def same(a, b, mask):
    """Equal at active tokens; ours is 0 at the others."""
    for x, y in zip(a, b, strict=True):
        assert x.dtype == torch.float64
        torch.testing.assert_close(x[mask != 0], y.double()[mask != 0], rtol=1e-6, atol=1e-6)
        assert (x[mask == 0] == 0).all()


@pytest.mark.parametrize("kind", ["floats", "integers", "fractions", "doubles"])
@pytest.mark.parametrize("name", ALL)
def test_values(theirs, name, kind):
    rewards, mask = data(kind)
    same(*(estimate(n, name, rewards, mask) for n in (OURS, theirs)), mask)


@pytest.mark.parametrize("name", ALL)
def test_single_precision(theirs, name):
    rewards, mask = data()
    changes = {"reward_baselines": torch.rand(9)} if name == "remax" else {}
    found = [estimate(n, name, rewards.float(), mask, **changes) for n in (OURS, theirs)]
    for a, b in zip(*found, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a[mask != 0], b.float()[mask != 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_std", [True, False])
def test_the_best_of_a_group_with_ties(theirs, by_std):
    rewards, mask = data()
    rewards = rewards.round()
    rewards[[1, 4, 6, 8]] = torch.tensor([3.0, 1.0, 3.0, 0.0])[:, None].double() / 9
    config = Config(norm_adv_by_std_in_grpo=by_std)
    found = [estimate(n, "grpo_passk", rewards, mask, config=config) for n in (OURS, theirs)]
    same(*found, mask)
    assert (found[0][0][[1, 4, 6, 8]] == 0).all()


@pytest.mark.parametrize("weights", [None, [0.5, 2.0]])
@pytest.mark.parametrize("by_std", [True, False])
def test_the_rewards_of_gdpo(theirs, weights, by_std):
    rewards, mask = data()
    torch.manual_seed(3)
    parts = {"format": as_array((torch.rand(9) < 0.5).float().tolist())}
    parts["answer"] = as_array((100 * torch.randn(9)).tolist())
    changes = {
        "config": {"gdpo_reward_keys": ["format", "answer"], "gdpo_reward_weights": weights},
        "non_tensor_batch": parts,
        "batch": {"prompts": torch.ones(9, 2), "attention_mask": torch.ones(9, 11).long()},
        "norm_adv_by_std_in_grpo": by_std,
    }
    a, b = (estimate(n, "gdpo", rewards, mask, **changes)[0] for n in (OURS, theirs))
    torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["floats", "fractions"])
def test_discounts(theirs, gamma, kind):
    rewards, mask = data(kind)
    config = Config(gamma=gamma)
    found = (
        estimate(n, "reinforce_plus_plus", rewards, mask, config=config) for n in (OURS, theirs)
    )
    same(*found, mask)


@pytest.mark.parametrize("kind", ["floats", "fractions"])
@pytest.mark.parametrize("name", ALL)
def test_masked_nan_is_inert(name, kind):
    rewards, mask = data(kind)
    rewards[mask == 0] = 0.0
    poisoned = torch.where(mask == 0, float("nan"), rewards)
    for a, b in zip(*(estimate(OURS, name, x, mask) for x in (rewards, poisoned)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ALL)
def test_an_empty_mask_gives_zero(name):
    rewards, mask = data()
    for found in estimate(OURS, name, rewards, 0 * mask):
        assert (found == 0).all()


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
@pytest.mark.parametrize("kind", ["floats", "integers"])
def test_a_single_token_cannot_be_whitened(name, kind):
    rewards, mask = data(kind)
    mask = torch.zeros_like(mask).index_put((torch.tensor(2), torch.tensor(3)), mask.new_ones(()))
    assert mask.sum() == 1
    assert (estimate(OURS, name, rewards, mask)[0] == 0).all()
    assert (compute_gae_advantage_return(rewards, 0 * rewards, mask, 1.0, 1.0)[0] == 0).all()


@pytest.mark.parametrize("name", GROUPED)
def test_rewards_of_zero_give_zero(theirs, name):
    rewards, mask = data()
    found, _ = estimate(OURS, name, 0 * rewards, mask)
    assert (found == 0).all()
    same(*(estimate(n, name, 0 * rewards, mask) for n in (OURS, theirs)), mask)


@pytest.mark.parametrize("name", sorted({*GROUPED} - {"gdpo", "reinforce_plus_plus_baseline"}))
def test_equal_rewards_give_exactly_zero(name):
    mask = data()[1]
    rewards = torch.full((9, 9), 0.1) / 9
    found, _ = estimate(OURS, name, rewards, mask, index=["a", "b", "c"] * 3)
    assert (found == 0).all()


def test_a_nan_reward_stays_in_its_group():
    rewards, mask = data()
    mask[:, 0] = 1.0
    rewards[2, 0] = float("nan")
    index = ["b", "a", "b", "a", "a", "c", "a", "c", "a"]
    plain = {"config": Config(norm_adv_by_std_in_grpo=False)}
    for name, changes in [("rloo", {}), ("opo", {}), ("grpo_passk", {}), ("grpo_passk", plain)]:
        found, _ = estimate(OURS, name, rewards, mask, index=index, **changes)
        assert found[:, 0].isnan().tolist() == [x == "b" for x in index]


REFUSED = [
    ("index must have groups of at least 2", "grpo_passk", {"index": INDEX}),
    ("config must be verl's AlgoConfig, got None", "grpo_passk", {"config": None}),
    ("config must be verl's AlgoConfig, got None", "reinforce_plus_plus", {"config": None}),
    ("gdpo_reward_keys must name the rewards", "gdpo", {"config": {}}),
    ("gdpo_reward_keys must be in .*x.*, got y", "gdpo", {"config": {"gdpo_reward_keys": ["y"]}}),
    (
        "gdpo_reward_weights must have 1 entries, .*got 2",
        "gdpo",
        {"config": {"gdpo_reward_keys": ["x"], "gdpo_reward_weights": [1.0, 2.0]}},
    ),
]


@pytest.mark.parametrize(("message", "name", "changes"), REFUSED)
def test_unsupported_arguments_are_refused_by_name(message, name, changes):
    if name == "gdpo":
        changes = {**changes, "non_tensor_batch": {"x": [0.0] * 9}, "batch": {}}
    with pytest.raises((ValueError, TypeError), match=message):
        estimate(OURS, name, *data(), **changes)


def test_every_estimator_was_compared():
    tested = {f"compute_{name}_outcome_advantage" for name in ALL}
    others = {"compute_grpo_vectorized_outcome_advantage"}
    assert {function.__name__ for function in _ESTIMATORS} == tested | others


@pytest.mark.skipif(importable(CORE) is None, reason="needs verl itself")
def test_what_remains_verls():
    core = importable(CORE)
    known = {function.__name__ for function in _ESTIMATORS}
    known |= {"compute_gae_advantage_return", "compute_grpo_outcome_advantage"}
    left = {name for name, x in core.ADV_ESTIMATOR_REGISTRY.items() if x.__name__ not in known}
    assert left == {"optimal_token_baseline", "tir_optimal_token_baseline"}
