"""Generalized advantage estimation and discounted returns, against the recurrence in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastrl
from tests.fuzz.oracle import advantages as oracle
from tests.fuzz.oracle.bounded import of_results
from tests.ops.closeness import assert_covers, assert_within_budget
from tests.ops.inputs import (
    FLOAT_DTYPES,
    MASKS,
    dtypes,
    in_layout,
    layouts,
    make_mask,
    mask_kinds,
    seeds,
    shapes,
)

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

nan = math.nan


def make_inputs(B, T, dtype=torch.float32, mask="random", ends=False, bootstrap=None):
    inputs = {
        "rewards": torch.randn(B, T).to(dtype),
        "values": torch.randn(B, T).to(dtype),
        "mask": make_mask(mask, B, T),
    }
    if ends:
        inputs["terminated"] = torch.rand(B, T) < 0.15
        inputs["truncated"] = torch.rand(B, T) < 0.15
    if bootstrap is not None:
        inputs["bootstrap_values"] = torch.randn((B,) if bootstrap == "sequence" else (B, T))
        inputs["bootstrap_values"] = inputs["bootstrap_values"].to(dtype)
    return inputs


def assert_exact(result, inputs, gamma, lam):
    """Compare with the recurrence of the oracle."""
    B, T = inputs["rewards"].shape
    sequence, numbers = np.repeat(np.arange(B), T), {}
    for name, x in inputs.items():
        x = x if x.dim() == 2 else x[:, None].expand(B, T)
        numbers[name] = x.to(torch.float64).numpy().flatten()
    flags = {k: numbers.get(k, np.zeros(B * T)).astype(bool) for k in ("terminated", "truncated")}
    following = None
    if "bootstrap_values" in inputs:
        after = numbers["bootstrap_values"]
        at_cuts = after if inputs["bootstrap_values"].dim() == 2 else np.full(B * T, np.nan)
        following = np.stack([after, at_cuts], 1)
    exact = oracle.gae(
        numbers["rewards"],
        numbers["values"],
        sequence,
        numbers["mask"].astype(bool),
        flags,
        following,
        gamma,
        lam,
        of_results(str(inputs["rewards"].dtype).removeprefix("torch.")),
    )
    for name, got, want in zip(result._fields, result, exact, strict=True):
        assert_covers(want.reshape(B, T), got, name)


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


@pytest.mark.parametrize(("gamma", "lam"), [(1, 0.95), (0.99, 0.9), (0.9, 0), (0.9, 1), (0, 0.95)])
@pytest.mark.parametrize("bootstrap", [None, "sequence", "token"])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_exact_for_every_kind_of_end(backend, mask, ends, bootstrap, gamma, lam):
    inputs = make_inputs(9, 7, mask=mask, ends=ends, bootstrap=bootstrap)
    result = fastrl.gae(**inputs, gamma=gamma, lam=lam, backend=backend)
    assert_exact(result, inputs, gamma, lam)


@pytest.mark.parametrize("dtype", [torch.float64, *FLOAT_DTYPES], ids=str)
def test_the_arithmetic_is_float32_or_better(backend, dtype):
    if backend != "reference" and dtype == torch.float64:
        pytest.skip("compiled backends take no float64")
    inputs = make_inputs(4, 30, dtype, ends=True, bootstrap="sequence")
    result = fastrl.gae(**inputs, gamma=0.99, lam=0.95, backend=backend)
    assert result.advantages.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert_exact(result, inputs, 0.99, 0.95)


def test_one_step_and_monte_carlo(backend):
    rewards, values = torch.randn(3, 6), torch.randn(3, 6)
    one_step = fastrl.gae(rewards, values, gamma=0.9, lam=0, backend=backend).advantages
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    torch.testing.assert_close(one_step, rewards + 0.9 * following - values)
    whole = fastrl.gae(rewards, values, gamma=0.9, lam=1, backend=backend).returns
    to_go = fastrl.discounted_returns(rewards, gamma=0.9, backend=backend)
    torch.testing.assert_close(whole, to_go)


def test_a_gap_of_masked_tokens_changes_no_bit(backend):
    inputs = make_inputs(1, 6, mask="all", ends=True, bootstrap="token")
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


def test_packed_tokens_without_bounds_are_one_sequence(backend):
    rewards, values = torch.randn(5), torch.randn(5)
    flat = fastrl.gae(rewards, values, bootstrap_values=torch.tensor([3.0]), backend=backend)
    padded = fastrl.gae(
        rewards[None], values[None], bootstrap_values=torch.tensor([3.0]), backend=backend
    )
    assert torch.equal(flat.advantages, padded.advantages[0])


@pytest.mark.not_on("triton")  # long
@given(shapes, layouts, mask_kinds, dtypes, seeds, st.floats(0, 1), st.floats(0, 1))
def test_any_shape_layout_and_mask(backend, shape, layout, mask, dtype, seed, gamma, lam):
    torch.manual_seed(seed)
    inputs = make_inputs(*shape, dtype, mask, ends=True, bootstrap="token")
    inputs = {name: in_layout(x, layout) for name, x in inputs.items()}
    result = fastrl.gae(**inputs, gamma=gamma, lam=lam, backend=backend)
    assert result.advantages.shape == inputs["rewards"].shape
    assert_exact(result, inputs, gamma, lam)


def test_no_token_at_all(backend):
    for shape in ((3, 0), (0, 4), (0,)):
        result = fastrl.gae(torch.zeros(shape), torch.zeros(shape), backend=backend)
        assert result.advantages.shape == result.returns.shape == shape


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
