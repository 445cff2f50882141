"""Group advantages: against a loop in float64, and known failures of others."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastrl
from tests.ops.closeness import assert_within_budget

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

BASELINES = ("mean", "leave_one_out", "none")
SCALES = ("group", "batch", "none", "mean")
nan = math.nan


def test_the_example_of_the_contract(backend):
    result = fastrl.group_advantages(
        torch.tensor([1.0, 0.8, 0.4, 0.2]), group_size=4, correction=0, eps=0, backend=backend
    )
    expected = [1.2649, 0.6325, -0.6325, -1.2649]
    assert result.advantages.tolist() == pytest.approx(expected, abs=5e-5)
    assert result.mean.tolist() == pytest.approx([0.6] * 4)
    assert result.std.tolist() == pytest.approx([math.sqrt(0.1)] * 4)
    assert result.informative.all()


@pytest.mark.parametrize("eps", [0, 1e-4])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize(("value", "n"), [(0.1, 8), (0.1, 7), (1e-30, 3), (1e30, 6), (0.0, 5)])
def test_a_group_of_equal_rewards_gives_exactly_zero(backend, value, n, baseline, scale, eps):
    rewards = torch.tensor([value] * n + [1.0, 2.0])
    ids = torch.tensor([0] * n + [1] * 2)
    options = {"baseline": baseline, "scale": scale, "eps": eps, "backend": backend}
    result = fastrl.group_advantages(rewards, group_ids=ids, **options)
    assert (result.advantages[:n] == 0).all()
    assert result.informative.tolist() == [False] * n + [True] * 2
    assert (result.std[:n] == 0).all()
    assert (result.mean[:n] == rewards[0]).all()
    alone = fastrl.group_advantages(rewards[:n], group_size=n, **options)
    assert (alone.advantages == 0).all()


def test_rewards_that_differ_in_the_fifth_digit_keep_their_spread(backend):
    rewards = 1 + 1e-5 * torch.arange(8, dtype=torch.float32)
    result = fastrl.group_advantages(rewards, group_size=8, eps=1e-8, backend=backend)
    exact = (rewards.double() - rewards.double().mean()) / (rewards.double().std() + 1e-8)
    torch.testing.assert_close(result.advantages.double(), exact, rtol=0, atol=1e-3)
    assert result.informative.all()


@pytest.mark.parametrize(("singleton", "expected"), [("zero", 0.0), ("raw", 0.7)])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_a_group_of_one(backend, baseline, scale, singleton, expected):
    options = {"baseline": baseline, "scale": scale, "singleton": singleton, "backend": backend}
    result = fastrl.group_advantages(torch.tensor([0.7]), group_size=1, **options)
    assert result.advantages.item() == pytest.approx(expected)
    assert result.mean.item() == pytest.approx(0.7)
    assert result.std.item() == 0
    assert result.informative.item() == (singleton == "raw")


@pytest.mark.not_on("triton", "cuda")  # a program, or a system thread, for each
def test_many_groups(backend):
    rewards = torch.randn(70000, 2)
    result = fastrl.group_advantages(rewards, scale="none", backend=backend)
    half = (rewards[:, 0].double() - rewards[:, 1]) / 2
    assert_within_budget(result.advantages, torch.stack([half, -half], 1), size=10)


def test_many_ids_in_random_order(backend):
    rewards, ids = torch.randn(4100), torch.randint(600, (4100,))  # Triton sorts above 4096
    options = {"group_ids": ids, "baseline": "leave_one_out"}
    came = fastrl.group_advantages(rewards, **options, backend=backend)
    exact = fastrl.group_advantages(rewards.double(), **options, backend="reference")
    for part, wanted in zip(came, exact, strict=True):
        torch.testing.assert_close(part, wanted.to(part.dtype), rtol=1e-5, atol=1e-6)


def test_large_offsets_do_not_cost_the_spread(backend):
    # E[x^2] - E[x]^2 would lose everything here
    for above in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6]):  # the second mean has endless digits
        small = torch.tensor(above, dtype=torch.float64)
        rewards = (1e6 + small).float()
        result = fastrl.group_advantages(rewards, group_size=6, eps=0, backend=backend)
        assert_within_budget(result.advantages, (small - small.mean()) / small.std())


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=12), st.booleans())
def test_any_ids(backend, ids, repeat):
    ids = torch.tensor([*ids, *ids[: len(ids) // 2]] if repeat else ids, dtype=torch.int64)
    rewards = (torch.randn(len(ids)) * 2).round()  # with equal ones
    small = torch.unique(ids, return_inverse=True)[1]
    found, wanted = (
        fastrl.group_advantages(rewards, group_ids=names, backend=backend) for names in (ids, small)
    )
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_maxrl(backend, baseline):
    # MaxRL's compute_p_normalization_outcome_advantage: (r - mean) / (mean + 1e-6)
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    options = {"scale": "mean", "eps": 1e-6, "baseline": baseline, "backend": backend}
    came = fastrl.group_advantages(rewards, **options).advantages
    mean = rewards.double().mean(1, keepdim=True)
    others = 4 / 3 if baseline == "leave_one_out" else 1.0
    expected = (rewards - mean) * others / (mean + 1e-6)
    torch.testing.assert_close(came.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rewards", [[-1.0, -1, -1, 1], [-1.0, 1, -1, 1], [-1.0, 2, 2, 2]])
def test_maxrl_refuses_negative_rewards(backend, rewards):
    """Their mean may turn every sign round, or be nearly 0."""
    with pytest.raises(ValueError, match=r"rewards .* mean of the group; got -1"):
        fastrl.group_advantages(torch.tensor(rewards), group_size=4, scale="mean", backend=backend)


def test_a_group_of_one_has_the_advantage_of_its_convention():
    rewards = torch.tensor([1.0, 2.0])
    result = fastrl.group_advantages(rewards, group_size=1, convention="verl")
    assert result.advantages.tolist() == [1, 2]
