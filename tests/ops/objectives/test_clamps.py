"""What a clamp does to the gradient: of each term of each token it leaves all, or nothing.

Where a bound acts, one factor of a term is constant. If the slope of the other factor remained, it
could push the other way, or harder than the term without bounds.
"""

import itertools
import math

import pytest
import torch

import fastrl
from fastrl import Objective
from fastrl.contract import KL_ESTIMATORS

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

INF = math.inf
#: Distances to the reference, and log-ratios; none is on a bound.
DISTANCES = [0.0, 0.25, -0.25, 0.75, -0.75, 1.5, -1.5, 2.75, 5.0, -9.0, -12.0, 39.0, -39.0]
DISTANCES += [41.0, -41.0, 60.0, -60.0, 81.0, -81.0, INF, -INF]
LOG_RATIOS = [0.0, 0.25, -0.25, 4.0, -4.0, 11.0, -21.0, 21.0, 39.0, 41.0, -41.0, 60.0, -85.0]
BOUNDS = [
    {"kl_clamp": kl_clamp, "log_ratio_clamp": clamp}
    for kl_clamp in (None, 0.5, 10.0)
    for clamp in (None, 20.0, (-INF, 10.0))
]
#: kl_gradient, level, kl_level
KINDS = [(gradient, "sequence", "token") for gradient in ("exact", "straight-through")]
KINDS += [
    ("bias-corrected", level, of_kl)
    for level in ("token", "sequence", "sequence-token")
    for of_kl in ("token", "policy")[: 1 + (level != "token")]
]
#: From log-probabilities, and what the other forms compute by themselves.
FORMS = [("policy_loss", *kind) for kind in KINDS]
FORMS += [("logits_policy_loss", *kind) for kind in (("exact", "token", "token"), *KINDS[2:5:2])]
FORMS += [("linear_policy_loss", *KINDS[2])]
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def pairs_of_tokens():
    """Distances and log-ratios of two tokens of a sequence, `[S, 2]`: each pair, beside another."""
    grid = torch.cartesian_prod(torch.tensor(DISTANCES), torch.tensor(LOG_RATIOS))
    beside = grid[torch.randperm(len(grid))]
    return torch.stack([grid, beside], 1).unbind(-1)


def kl_of(x, estimator):
    """k and dk/dlogprob."""
    return {
        "k1": (-x, torch.ones_like(x)),
        "k2": (x.square() / 2, -x),
        "k3": (torch.expm1(x) - x, -torch.expm1(x)),
        "abs": (x.abs(), -x.sign()),
    }[estimator]


def true_slopes(x, log_ratio, estimator, gradient, *, shared):
    """Gradient of the term of token u by the log-probability of token t, `[S, u, t]`; its parts."""
    k, slope = kl_of(x, estimator)
    own = torch.eye(2, dtype=x.dtype)
    if gradient == "exact":
        return slope[..., None] * own, slope.abs()
    if gradient == "straight-through":
        return -x[..., None] * own, x.abs()
    r = log_ratio.exp()
    sizes = r * (slope.abs() + k.abs())
    if shared:
        return r[..., None] * (slope[..., None] * own + k[..., None] / 2), sizes
    if estimator == "k3":  # without parts that cancel
        return (-x * r)[..., None] * own, r * x.abs()
    return (r * (slope + k))[..., None] * own, sizes


def within_bounds(x, log_ratio, o):
    """Which tokens are inside of all bounds, where nothing may be lost."""
    k, _ = kl_of(x, o.kl_estimator)
    corrected = o.kl_gradient == "bias-corrected"
    limit = 40.0 if corrected else 80.0
    inside = x.abs() < limit
    if o.kl_gradient != "straight-through" and o.kl_clamp is not None:
        inside &= k.abs() < o.kl_clamp
    if corrected:
        clamp = o.log_ratio_clamp
        low, high = clamp if isinstance(clamp, tuple) else (-(clamp or INF), clamp or INF)
        inside &= (log_ratio > max(low, -limit)) & (log_ratio < min(high, limit))
    return inside


def assert_all_or_nothing(came, terms, sizes, inside, unit):
    """The gradient of each sequence is the sum of those of some terms, of all that are inside."""
    best = torch.full(came.shape[:1], INF, dtype=torch.float64)
    for chosen in itertools.product((False, True), repeat=2):
        chosen = torch.tensor(chosen)
        wanted = torch.where(chosen[:, None], terms, 0.0).sum(1)
        # roundings of k, of the ratio (its argument of up to 85) and of their product
        room = 400 * unit * torch.where(chosen, sizes, 0.0).sum(1, keepdim=True) + 1e-30
        error = ((came - wanted).abs() / room).amax(1).nan_to_num(nan=INF)
        best = torch.minimum(best, torch.where((inside & ~chosen).any(1), INF, error))
    worst = int(best.argmax())
    assert best[worst] <= 1, f"sequence {worst}: {came[worst]} is no sum of {terms[worst]}"


def gradient_of(backend, form, inputs, **given):
    """dL/dlogprobs for advantages of 0."""
    inputs = inputs.clone().requires_grad_()
    tokens = inputs.new_ones(inputs.shape[:2])
    options = {"mask": tokens, "advantages": torch.zeros_like(tokens), **given, "backend": backend}
    if form == "policy_loss":
        fastrl.policy_loss(inputs, **options).loss.backward()
        return inputs.grad.double()
    ids, head = torch.zeros_like(tokens, dtype=torch.int64), torch.eye(2, dtype=inputs.dtype)
    heads = [head] * (form == "linear_policy_loss")
    getattr(fastrl, form)(inputs, *heads, ids, **options).loss.backward()
    return inputs.grad[..., 0].double() * (1 + math.e ** inputs[..., 0].double())


@pytest.mark.parametrize(("form", "gradient", "level", "kl_level"), FORMS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.some_on("triton", "cuda")
def test_the_slope_of_a_kl_is_the_true_one_or_0(
    backend, estimator, form, gradient, level, kl_level
):
    dtype = torch.float64 if backend == "reference" else torch.float32
    distance, log_ratio = (x.to(dtype) for x in pairs_of_tokens())
    inputs = logprobs = torch.full_like(distance, -1.0)
    if form != "policy_loss":  # two logits, or their hidden states with the identity as head
        inputs = torch.stack([0.5 + 0 * logprobs, 0 * logprobs], -1)
        ids = torch.zeros_like(logprobs, dtype=torch.int64)
        logprobs = fastrl.token_logprobs(inputs, ids, backend=backend)
    old, ref = logprobs - log_ratio, logprobs + distance
    distance = fastrl.reference.objectives.difference(ref.double(), logprobs.double())
    log_ratio = logprobs.double() - old.double()
    options = {"kl_coef": 1.0, "kl_estimator": estimator, "kl_gradient": gradient, "level": level}
    corrected = gradient == "bias-corrected"
    if corrected and level != "token":
        options["kl_level"] = kl_level
    x = distance
    if level != "token" and kl_level == "policy":
        log_ratio = log_ratio.mean(1, keepdim=True).expand(-1, 2)
    shared = corrected and (level, kl_level) == ("sequence", "policy")
    terms, sizes = true_slopes(x, log_ratio, estimator, gradient, shared=shared)
    for bounds in BOUNDS[:: 1 if backend in ("reference", "cpu") else 4]:
        o = Objective(aggregation="token-sum", **options, **bounds)
        came = gradient_of(backend, form, inputs, old_logprobs=old, ref_logprobs=ref, objective=o)
        assert came.isfinite().all()
        inside = within_bounds(x, log_ratio, o)
        assert_all_or_nothing(came, terms, sizes, inside, UNIT[dtype])


#: The surrogates whose slope is that without bounds, or 0: of cispo and gmpo a bound is a weight.
SURROGATES = [{"clip_low": 0.2, "clip_high": 0.3, **more} for more in ({}, {"dual_clip": 3.0})]
SURROGATES += [{"clip_low": 0.2, "clip_high": 0.3, "delta": 4.0}]
SURROGATES += [{"surrogate": "sapo", "sapo_temperature_pos": 2.0}]


def slopes_of_surrogate(log_ratio, advantages, o):
    """df/d log r without bounds, and where no bound may act."""
    r, (low, high) = log_ratio.exp(), (1 - o.clip_low, 1 + o.clip_high)
    if o.surrogate == "sapo":
        tau = torch.full_like(r, o.sapo_temperature_neg)
        tau[advantages > 0] = o.sapo_temperature_pos
        gate = torch.sigmoid(tau * (r - 1)) * torch.sigmoid(-tau * (r - 1))
        return -4 * gate * r * advantages, torch.ones_like(r, dtype=torch.bool)
    most = min(o.dual_clip or INF, o.delta or INF)
    return -r * advantages, torch.where(advantages > 0, r < high, (r > low) & (r < most))


@pytest.mark.parametrize("log_ratio_clamp", [None, 20.0, (-INF, 10.0)])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence-token"])
@pytest.mark.parametrize("fields", SURROGATES)
@pytest.mark.some_on("triton", "cuda")
def test_the_slope_of_a_surrogate_is_the_true_one_or_0(backend, fields, level, log_ratio_clamp):
    dtype = torch.float64 if backend == "reference" else torch.float32
    o = Objective(aggregation="token-sum", level=level, log_ratio_clamp=log_ratio_clamp, **fields)
    log_ratio = pairs_of_tokens()[1].to(dtype)
    advantages = torch.tensor([1.0, -2.0])[torch.randint(2, log_ratio.shape)].to(dtype)
    logprobs = torch.full_like(log_ratio, -1.0).requires_grad_()
    old = logprobs.detach() - log_ratio
    fastrl.policy_loss(
        logprobs, advantages, torch.ones_like(old), old_logprobs=old, objective=o, backend=backend
    ).loss.backward()
    x = log_ratio.double()
    x = x if level == "token" else x.mean(1, keepdim=True).expand(-1, 2)
    slope, free = slopes_of_surrogate(x, advantages.double(), o)
    low, high = {None: (-80.0, 80.0), 20.0: (-20.0, 20.0)}.get(log_ratio_clamp, (-80.0, 10.0))
    own = torch.full((2, 2), 0.5) if level == "sequence" else torch.eye(2)
    terms, inside = slope[..., None] * own.double(), free & (x > low) & (x < high)
    sizes = slope.abs() * (1 + 2 * x.exp())  # tau (r - 1) in the exponent of sapo
    assert_all_or_nothing(logprobs.grad.double(), terms, sizes, inside, UNIT[dtype])
