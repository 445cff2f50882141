"""Generalized advantage estimation and discounted returns, against the recurrence in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastrl
from tests.ops.closeness import assert_within_budget
from tests.ops.inputs import (
    FLOAT_DTYPES,
    MASKS,
    cu_seqlens,
    dtypes,
    in_layout,
    layouts,
    make_mask,
    mask_kinds,
    packed,
    poisons,
    seeds,
    shapes,
)

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

nan = math.nan


def exact_sequence(tokens, gamma, lam, after):
    """Advantages of one sequence; `tokens` are dicts of its valid tokens, `after` what follows.

    Straight from the sum A_t = sum_k (gamma lam)^k delta_{t+k}, ended by the first cut.
    """
    deltas = []
    for i, token in enumerate(tokens):
        last = i == len(tokens) - 1
        follows = after if last else tokens[i + 1]["value"]
        if "bootstrap" in token and (last or token.get("truncated")):
            follows = token["bootstrap"]
        if token.get("terminated"):
            follows = 0.0
        deltas.append(token["reward"] + gamma * follows - token["value"])
    advantages = []
    for start in range(len(tokens)):
        total, factor = 0.0, 1.0
        for i in range(start, len(tokens)):
            total += factor * deltas[i]
            if tokens[i].get("terminated") or tokens[i].get("truncated"):
                break
            factor *= gamma * lam
        advantages.append(total)
    return advantages


def exact_gae(rewards, values, mask, gamma, lam, bootstrap_values=None, **ends):
    """Advantages and returns `[B, T]` in float64."""
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    per_token = bootstrap_values is not None and bootstrap_values.dim() == 2
    for b in range(rewards.shape[0]):
        valid = mask[b].nonzero()[:, 0].tolist()
        tokens = []
        for t in valid:
            token = {"reward": rewards[b, t].item(), "value": values[b, t].item()}
            token |= {name: bool(flags[b, t]) for name, flags in ends.items()}
            if per_token:
                token["bootstrap"] = bootstrap_values[b, t].item()
            tokens.append(token)
        after = 0.0 if bootstrap_values is None or per_token else bootstrap_values[b].item()
        came = exact_sequence(tokens, gamma, lam, after)
        advantages[b, valid] = torch.tensor(came, dtype=torch.float64)
    return advantages, torch.where(mask, advantages + values.double(), 0.0)


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


def assert_exact(result, inputs, gamma, lam, B, T):
    advantages, returns = exact_gae(**inputs, gamma=gamma, lam=lam)
    # every advantage adds up to T deltas, each a few roundings off
    size = 1 + advantages.abs().max() if B * T else 1.0
    assert_within_budget(result.advantages, advantages, size=size)
    assert_within_budget(result.returns, returns, size=size + 4)


def same(part, wanted, backend):
    """Compare bits, or closely where the order of additions depends on the position of tokens."""
    if backend == "triton":
        return torch.allclose(part, wanted, rtol=1e-5, atol=1e-5)
    return torch.equal(part, wanted)


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
    assert_exact(result, inputs, gamma, lam, 9, 7)


@pytest.mark.parametrize("dtype", [torch.float64, *FLOAT_DTYPES], ids=str)
def test_the_arithmetic_is_float32_or_better(backend, dtype):
    if backend != "reference" and dtype == torch.float64:
        pytest.skip("compiled backends take no float64")
    inputs = make_inputs(4, 30, dtype, ends=True, bootstrap="sequence")
    result = fastrl.gae(**inputs, gamma=0.99, lam=0.95, backend=backend)
    assert result.advantages.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert_exact(result, inputs, 0.99, 0.95, 4, 30)


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
        assert same(torch.cat([part[:, :4], part[:, 1004:]], 1), wanted, backend)


@given(seeds, poisons, st.sampled_from([None, "sequence", "token"]))
def test_values_at_masked_tokens_change_no_bit(backend, seed, poison, bootstrap):
    torch.manual_seed(seed)
    inputs = make_inputs(4, 8, ends=True, bootstrap=bootstrap)
    clean = fastrl.gae(**inputs, backend=backend)
    masked = ~inputs["mask"]
    for name, x in inputs.items():
        if x.dtype == torch.bool and name != "mask":
            inputs[name] = x ^ (masked & (torch.rand(4, 8) < 0.5))
        elif x.shape == masked.shape and name != "mask":
            inputs[name] = x.masked_fill(masked, poison)
    dirty = fastrl.gae(**inputs, backend=backend)
    assert torch.equal(clean.advantages, dirty.advantages)
    assert torch.equal(clean.returns, dirty.returns)


@pytest.mark.parametrize("bootstrap", [None, "sequence", "token"])
def test_packed_sequences_give_the_same_as_padded_ones(backend, bootstrap):
    lengths = [3, 0, 5, 1, 0, 7, 4, 4, 4, 4, 0]
    inputs = make_inputs(len(lengths), 7, ends=True, bootstrap=bootstrap)
    inputs["mask"] &= torch.arange(inputs["mask"].shape[1]) < torch.tensor(lengths)[:, None]
    padded = fastrl.gae(**inputs, gamma=0.9, backend=backend)
    flat = {name: packed(x, lengths) if x.dim() == 2 else x for name, x in inputs.items()}
    result = fastrl.gae(**flat, gamma=0.9, cu_seqlens=cu_seqlens(lengths), backend=backend)
    for part, wanted in zip(result, padded, strict=True):
        assert same(part, packed(wanted, lengths), backend)


@pytest.mark.parametrize("ends", [{}, {"truncated": torch.zeros(3, 9)}], ids=["trace", "value"])
def test_a_nan_harms_no_other_sequence(backend, ends):
    inputs = {"rewards": torch.randn(3, 9), "values": torch.randn(3, 9), **ends}
    clean = fastrl.gae(**inputs, backend=backend)
    inputs["rewards"][1, 6] = nan
    broken = fastrl.gae(**inputs, backend=backend)
    for part, wanted in zip(broken, clean, strict=True):
        assert part[1, :7].isnan().all()
        part[1, :7] = wanted[1, :7]
        assert torch.equal(part, wanted)


def test_packed_tokens_without_bounds_are_one_sequence(backend):
    rewards, values = torch.randn(5), torch.randn(5)
    flat = fastrl.gae(rewards, values, bootstrap_values=torch.tensor([3.0]), backend=backend)
    padded = fastrl.gae(
        rewards[None], values[None], bootstrap_values=torch.tensor([3.0]), backend=backend
    )
    assert torch.equal(flat.advantages, padded.advantages[0])


@given(shapes, layouts, mask_kinds, dtypes, seeds, st.floats(0, 1), st.floats(0, 1))
def test_any_shape_layout_and_mask(backend, shape, layout, mask, dtype, seed, gamma, lam):
    torch.manual_seed(seed)
    inputs = make_inputs(*shape, dtype, mask, ends=True, bootstrap="token")
    inputs = {name: in_layout(x, layout) for name, x in inputs.items()}
    result = fastrl.gae(**inputs, gamma=gamma, lam=lam, backend=backend)
    assert result.advantages.shape == inputs["rewards"].shape
    assert_exact(result, inputs, gamma, lam, *inputs["rewards"].shape)


def test_no_token_at_all(backend):
    for shape in ((3, 0), (0, 4), (0,)):
        result = fastrl.gae(torch.zeros(shape), torch.zeros(shape), backend=backend)
        assert result.advantages.shape == result.returns.shape == shape


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


def test_constants_without_gradient(backend):
    rewards, values = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    result = fastrl.gae(rewards, values, backend=backend)
    assert not result.advantages.requires_grad
    assert not result.returns.requires_grad


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


def test_two_runs_are_bit_equal(backend):
    inputs = make_inputs(37, 61, ends=True, bootstrap="sequence")
    first, second = (fastrl.gae(**inputs, backend=backend) for _ in range(2))
    assert torch.equal(first.advantages, second.advantages)
