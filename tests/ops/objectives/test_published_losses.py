"""Losses and rejections against the formulas of the code that published them, in float64."""

import math
from pathlib import Path

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection, TrustRegion

pytestmark = [pytest.mark.kernels, pytest.mark.not_on("triton")]
inf = math.inf
B, T = 5, 7


@pytest.fixture
def near():
    """Log-probabilities, those of the old policy or of the engine, advantages and a mask."""
    mask = (torch.rand(B, T) < 0.8).double()
    mask[0], mask[4] = 1, 0
    logprobs = -torch.rand(B, T).double() * 3 - 0.05
    apart, shift = torch.tensor([[0.02, 0.1, 0.5, 0.25, 0.2], [0.0, 0.0, 0.4, -0.6, 0.0]])
    others = logprobs + shift[:, None] + torch.randn(B, T) * apart[:, None]
    others = others.clamp(max=-1e-3)
    return logprobs.float().double(), others.float().double(), torch.randn(B, T).double(), mask


def gradient(backend, logprobs, advantages, mask, **arguments):
    real = torch.float64 if backend == "reference" else torch.float32
    leaf = logprobs.to(real, copy=True).requires_grad_()
    given = {k: x.to(real) if isinstance(x, torch.Tensor) else x for k, x in arguments.items()}
    fastrl.policy_loss(leaf, advantages.to(real), mask, **given, backend=backend).loss.backward()
    return leaf.grad.double()


def close(came, expected):
    torch.testing.assert_close(came, expected, rtol=1e-5, atol=1e-7)


# --- rejection: which tokens it keeps


def verl_keeps(x, mask, option, low, high):
    """verl's `compute_rollout_rejection_mask` with x = old - rollout; k1 is bounded by ratios."""
    level, estimator = option.rsplit("_", 1)
    x = x.clamp(-20, 20)
    statistic = {"k1": -x, "k2": 0.5 * x**2, "k3": x.exp() - 1 - x}[estimator]
    if level == "seq_sum":
        statistic = (statistic * mask).sum(-1, keepdim=True)
    elif level == "seq_mean":
        statistic = (statistic * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    elif level == "seq_max":
        statistic = statistic.masked_fill(mask == 0, -inf).amax(-1, keepdim=True)
    if estimator == "k1":
        return (statistic >= math.log(low)) & (statistic <= math.log(high))
    return statistic <= high


def areal_keeps(x, mask, metric, level, agg, low, high):
    """AReaL's `apply_rejection_sampling` with x = proximal - behavior, action `mask`."""
    value = {"ratio": x, "kl_k1": x, "kl_k2": x**2 / 2, "kl_k3": (-x).exp() - 1 + x}[metric]
    if level == "sequence":
        total, count = (value * mask).sum(-1, keepdim=True), mask.sum(-1, keepdim=True).clamp(min=1)
        largest = value.masked_fill(mask == 0, -inf).amax(-1, keepdim=True)
        value = {"sum": total, "mean": total / count, "max": largest}[agg]
    value = value.exp() if metric == "ratio" else value
    return (value >= (-inf if low is None else low)) & (value <= high)


LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}
OF_VERL = [
    (f"{level}_{estimator}", *bounds)
    for level in LEVELS
    for estimator, bounds in (("k1", (0.85, 1.2)), ("k2", (None, 0.1)), ("k3", (None, 0.08)))
    if level != "seq_max"
] + [(f"seq_max_{estimator}", None, 0.01) for estimator in ("k2", "k3")]
OF_AREAL = [
    (metric, level, agg, low, high)
    for level, agg in (("token", "mean"), *(("sequence", agg) for agg in ("sum", "mean", "max")))
    for metric, low, high in (
        ("ratio", 0.8, 1.3),
        ("kl_k1", -0.2, 0.3),
        ("kl_k2", None, 0.1),
        ("kl_k3", None, 0.08),
    )
    if (metric, agg) != ("kl_k1", "max")  # the largest x is the smallest k1: no level here
]


def assert_kept(backend, near, correction, kept):
    old, rollout, _, mask = near
    o = Objective(aggregation="token-sum", rollout_correction=correction)
    inputs = {"old_logprobs": old, "rollout_logprobs": rollout, "objective": o}
    weights = -gradient(backend, old, torch.ones_like(old), mask, **inputs)
    expected = (mask * kept).double()
    assert 0 < expected.sum() < mask.sum()
    close(weights, expected)


@pytest.mark.parametrize(("option", "low", "high"), OF_VERL)
def test_rejection_of_verl(backend, near, option, low, high):
    old, rollout, _, mask = near
    level, estimator = option.rsplit("_", 1)
    bounds = {"high": high}
    if estimator == "k1":
        bounds = {"low": math.log(low), "high": math.log(high)}
    correction = RolloutCorrection(
        kind="filter", level=LEVELS[level], estimator=estimator, **bounds
    )
    assert_kept(backend, near, correction, verl_keeps(old - rollout, mask, option, low, high))


@pytest.mark.parametrize(("metric", "level", "agg", "low", "high"), OF_AREAL)
def test_rejection_of_areal(backend, near, metric, level, agg, low, high):
    old, rollout, _, mask = near
    estimator = {"kl_k3": "reverse-k3"}.get(metric, metric.removeprefix("kl_"))
    bounds = {"low": low or 0.0, "high": high}
    if estimator == "k1":
        bounds = {"low": -high, "high": -low}
    names = {"sum": "sequence", "mean": "geometric", "max": "max"}
    correction = RolloutCorrection(
        kind="filter",
        level="token" if level == "token" else names[agg],
        estimator=estimator,
        **bounds,
    )
    kept = areal_keeps(old - rollout, mask, metric, level, agg, low, high)
    assert_kept(backend, near, correction, kept)


def test_rejected_tokens_are_not_projected(backend, near):
    old, rollout, _, mask = (x.float() for x in near)
    ids = torch.zeros(B, T, dtype=torch.int64)
    correction = RolloutCorrection(kind="filter", estimator="k2", level="max", high=0.1)
    result = fastrl.linear_policy_loss(
        torch.randn(B, T, 4),
        torch.randn(9, 4),
        ids,
        torch.ones(B),
        mask,
        old_logprobs=old,
        rollout_logprobs=rollout,
        objective=Objective(rollout_correction=correction),
        metrics=False,
        backend=backend,
    )
    kept = verl_keeps(old - rollout, mask, "seq_max_k2", None, 0.1)
    assert torch.equal(result.logprobs != 0, (mask * kept).bool())


@pytest.mark.parametrize("entropy_aggregation", [None, "token-sum"])
def test_a_rejected_token_keeps_its_entropy_bonus(backend, near, entropy_aggregation):
    """It is the only term of such a token that is left, also from hidden states."""
    old, rollout, advantages, mask = (x.float() for x in near)
    hidden, weight, ids = torch.randn(B, T, 4), torch.randn(9, 4), torch.zeros(B, T).long()
    correction = RolloutCorrection(kind="mask", high=1.1, low=0.9)
    own = {"entropy_coef": 0.1, "entropy_aggregation": entropy_aggregation}
    o = Objective(kl_coef=0.2, rollout_correction=correction, **own)
    options = {"old_logprobs": old, "ref_logprobs": old, "rollout_logprobs": rollout}
    options |= {"objective": o, "backend": backend}
    leaves = [hidden.clone().requires_grad_() for _ in range(2)]
    rest = (ids, advantages, mask)
    fastrl.logits_policy_loss(leaves[0] @ weight.T, *rest, **options).loss.backward()
    options["metrics"] = False  # so rows without a weight are not projected
    fastrl.linear_policy_loss(leaves[1], weight, *rest, **options).loss.backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-5, atol=1e-6)
    assert torch.equal((leaves[1].grad != 0).any(-1), mask.bool())


# --- masks by the current policy


def m2po(b, threshold):
    """The mask of arXiv 2510.01161, in the words of AReaL's `_get_m2po_loss_mask`, as gradient."""
    logprobs, old, A, mask = b
    x = logprobs - old
    hurts = ((A > 0) & (x > 0) | (A < 0) & (x < 0)) & (mask > 0)
    squares, order = (x**2)[hurts].sort(descending=True)
    averages = squares.flip(0).cumsum(0).flip(0) / torch.arange(len(squares), 0, -1)
    fits = (averages <= threshold).nonzero()
    dropped = order[: fits[0, 0] if len(fits) else len(order)]
    keeps = torch.ones_like(order, dtype=torch.bool)
    keeps[dropped] = False
    kept = torch.ones_like(mask)
    kept[hurts] = keeps.double()
    return -(kept * mask * A * x.exp()) / mask.sum()


def skyrl_dppo(b, kind, low, high):
    """SkyRL's `dppo_policy_loss`, as gradient."""
    logprobs, old, A, mask = b
    p, q = logprobs.exp(), old.exp()
    kept = torch.ones_like(A)
    if kind == "tv":
        kept[(A > 0) & (p - q > high)] = 0
        kept[(A < 0) & (q - p > low)] = 0
    else:
        kl = q * (old - logprobs) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
        kept[(A > 0) & (p > q) & (kl > high)] = 0
        kept[(A < 0) & (p < q) & (kl > low)] = 0
    return -(kept * mask * A * (logprobs - old).clamp(-20, 20).exp()) / mask.sum()


def assert_masked(backend, near, objective, expected):
    logprobs, old, A, mask = near
    assert ((expected == 0) & (mask > 0)).any()
    close(gradient(backend, logprobs, A, mask, old_logprobs=old, objective=objective), expected)


@pytest.mark.parametrize("threshold", [0.04, 0.01, 1e-9])
def test_m2po(backend, near, threshold):
    o = Objective.preset("m2po", trust_region=TrustRegion(kind="m2", high=threshold))
    assert Objective.preset("m2po").trust_region == TrustRegion(kind="m2", high=0.04)
    assert_masked(backend, near, o, m2po(near, threshold))


def test_a_mean_square_on_the_bound_of_m2po_is_within_it(backend):
    old = torch.full((1, 4), -2.0)
    logprobs = old + torch.tensor([[0.5, 0.25, 1.0, 0.0]])  # means of 1/16, 5/32, 7/16
    for high, kept in ((1 / 16, [0, 1, 0, 1]), (5 / 32, [1, 1, 0, 1]), (7 / 16, [1, 1, 1, 1])):
        o = Objective.preset("m2po", trust_region=TrustRegion(kind="m2", high=high))
        inputs = {"old_logprobs": old, "objective": o}
        came = gradient(backend, logprobs, torch.ones(1, 4), torch.ones(1, 4), **inputs)
        assert (came != 0).tolist() == [[bool(x) for x in kept]]


@pytest.mark.parametrize(("low", "high"), [(None, 0.02), (0.05, 0.01)])
@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_of_skyrl(backend, near, kind, low, high):
    region = TrustRegion(kind=kind, low=low, high=high)
    o = Objective.preset(f"dppo_{kind}", trust_region=region)
    assert_masked(backend, near, o, skyrl_dppo(near, kind, low or high, high))


# --- IW-OPD


def trl_iw_opd(b, gamma, epsilon=1e-8):
    """TRL's `_compute_iw_opd_loss`, as gradient; the old policy is the teacher."""
    rollout, teacher, _, mask = b
    gap = torch.where(mask > 0, teacher - rollout, 0.0)
    before = gap.abs().cumsum(1) - gap.abs()
    total = gap.abs().sum(1, keepdim=True).clamp_min(epsilon)
    return -(1 + gamma * (1 - before / total)) * gap * mask / mask.sum()


@pytest.mark.parametrize("packs", [False, True])
def test_iw_opd_of_the_docs(backend, near, packs):
    text = (Path(__file__).parents[3] / "docs" / "conventions.md").read_text()
    names = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    rollout, teacher, _, mask = near
    inputs = [teacher.masked_fill(mask == 0, math.nan), rollout, mask]
    bounds = torch.arange(0, B * T + 1, T) if packs else None
    shape = (-1,) if packs else (B, T)
    inputs = [x.float().reshape(shape) for x in inputs]
    advantages = names["iw_opd_advantages"](*inputs, gamma=0.7, cu_seqlens=bounds)
    came = gradient(backend, inputs[1], advantages, inputs[2], objective="reinforce")
    close(came.reshape(B, T), trl_iw_opd(near, 0.7))
