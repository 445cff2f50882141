"""GAE and discounted returns by hand, and of gaps, many sequences and long ones."""

import math

import pytest
import torch

import fastrl
from tests.ops.closeness import assert_within_budget

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

nan = math.nan


def test_the_example_of_the_contract(backend):
    result = fastrl.gae(
        torch.tensor([[0.0, 1.0, 0.0]]),
        torch.tensor([[0.0, 0.0, 100.0]]),
        torch.tensor([[1, 1, 0]]),
        gamma=1.0,
        lam=0.95,
        backend=backend,
    )
    assert result.advantages[0].tolist() == pytest.approx([0.95, 1, 0])
    assert result.returns[0].tolist() == pytest.approx([0.95, 1, 0])


# terminated wins
BOTH = {"terminated": [[0, 1, 1]], "truncated": [[0, 1, 1]], "bootstrap_values": [8.0]}

# gamma 0.5, lam 0.5, rewards 1 1 1, values 2 4 6: delta = 1, 0, -5 (+ 0.5 bootstrap at the end)
BY_HAND = [
    ({}, [1 + 0 - 5 / 16, -5 / 4, -5]),
    ({"bootstrap_values": [8.0]}, [1 + 0 - 1 / 16, -1 / 4, -1]),
    ({"terminated": [[0, 1, 0]]}, [1 - 3 / 4, -3, -5]),
    ({"truncated": [[0, 1, 0]]}, [1, 0, -5]),
    ({"truncated": [[0, 1, 0]], "bootstrap_values": [8.0]}, [1, 0, -1]),
    ({"truncated": [[0, 1, 0]], "bootstrap_values": [[9.0, 2, 8]]}, [1 - 2 / 4, -2, -1]),
    (BOTH, [1 - 3 / 4, -3, -5]),
    ({"mask": [[1, 0, 1]]}, [2 - 5 / 4, 0, -5]),  # delta = 1 + 3 - 2
]


@pytest.mark.parametrize(("options", "expected"), BY_HAND)
def test_numbers_by_hand(backend, options, expected):
    options = {name: torch.tensor(value) for name, value in options.items()}
    values = torch.tensor([[2.0, 4.0, 6.0]])
    result = fastrl.gae(torch.ones(1, 3), values, **options, gamma=0.5, lam=0.5, backend=backend)
    assert result.advantages[0].tolist() == pytest.approx(expected)


def test_one_step_and_monte_carlo(backend):
    rewards, values = torch.randn(3, 6), torch.randn(3, 6)
    one_step = fastrl.gae(rewards, values, gamma=0.9, lam=0, backend=backend).advantages
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    torch.testing.assert_close(one_step, rewards + 0.9 * following - values)
    whole = fastrl.gae(rewards, values, gamma=0.9, lam=1, backend=backend).returns
    to_go = fastrl.discounted_returns(rewards, gamma=0.9, backend=backend)
    torch.testing.assert_close(whole, to_go)


def test_a_gap_of_masked_tokens_changes_no_bit(backend):
    inputs = {name: torch.randn(1, 6) for name in ("rewards", "values", "bootstrap_values")}
    inputs["mask"] = torch.ones(1, 6, dtype=torch.bool)
    inputs |= {name: torch.rand(1, 6) < 0.15 for name in ("terminated", "truncated")}
    expected = fastrl.gae(**inputs, gamma=0.9, backend=backend)
    wide = {}
    for name, x in inputs.items():
        gap = torch.zeros(1, 1000, dtype=x.dtype) if not x.is_floating_point() else None
        gap = torch.full((1, 1000), nan) if gap is None else gap
        wide[name] = torch.cat([x[:, :4], gap, x[:, 4:]], 1)
    result = fastrl.gae(**wide, gamma=0.9, backend=backend)
    for part, wanted in zip(result, expected, strict=True):
        assert (part[:, 4:1004] == 0).all()
        found = torch.cat([part[:, :4], part[:, 1004:]], 1)
        if backend == "triton":  # the order of additions depends on the position of tokens
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found, wanted)


@pytest.mark.not_on("triton")  # a program for each
def test_many_short_sequences(backend):
    rewards, values = torch.randn(70000, 2), torch.randn(70000, 2)
    result = fastrl.gae(rewards, values, gamma=0.9, lam=0.5, backend=backend)
    second = rewards[:, 1].double() - values[:, 1]
    first = rewards[:, 0].double() + 0.9 * values[:, 1] - values[:, 0] + 0.45 * second
    assert_within_budget(result.advantages, torch.stack([first, second], 1), size=10)


def test_a_very_long_sequence_keeps_its_digits(compiled):
    T, gamma, lam = 131072, 0.999, 0.99
    rewards, values = torch.randn(2, T), torch.randn(2, T) * 10
    mask = torch.rand(2, T) < 0.9
    result = fastrl.gae(rewards, values, mask, gamma=gamma, lam=lam, backend="cpu")
    for b in range(2):
        exact, trace, following = [], 0.0, 0.0
        rows = (rewards[b].tolist(), values[b].tolist(), mask[b].tolist())
        for reward, value, valid in reversed(list(zip(*rows, strict=True))):
            if valid:
                trace = reward + gamma * following - value + gamma * lam * trace
                following = value
            exact.append(trace if valid else 0.0)
        exact = torch.tensor(exact[::-1], dtype=torch.float64)
        worst = (result.advantages[b] - exact).abs().max()
        assert worst <= 1e-6 * exact.abs().max()


def test_discounted_returns_by_hand(backend):
    rewards = torch.tensor([[1.0, 2.0, nan, 4.0]])
    mask = torch.tensor([[1, 1, 0, 1]])
    options = {"gamma": 0.5, "backend": backend}
    assert fastrl.discounted_returns(rewards, mask, **options).tolist() == [[3, 4, 0, 4]]
    after = fastrl.discounted_returns(
        rewards, mask, bootstrap_values=torch.tensor([8.0]), **options
    )
    assert after.tolist() == [[4, 6, 0, 8]]
    cut = torch.tensor([[0, 1, 0, 0]])
    ended = fastrl.discounted_returns(rewards, mask, terminated=cut, **options)
    assert ended.tolist() == [[2, 2, 0, 4]]
    follows = torch.tensor([[nan, 6.0, nan, 2.0]])
    stopped = fastrl.discounted_returns(
        rewards, mask, truncated=cut, bootstrap_values=follows, **options
    )
    assert stopped.tolist() == [[3.5, 5, 0, 5]]
