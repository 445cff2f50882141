"""The scalar objectives: C++ against the reference, numbers by hand, properties."""

import math

import pytest
import torch

import fastrl
from fastrl.contract import KL_ESTIMATORS, KL_GRADIENTS, SURROGATES
from fastrl.reference import objectives

pytestmark = pytest.mark.usefixtures("poisoned_memory")

inf = math.inf
OBJECTIVE = fastrl.Objective(clip_high=0.28).arguments
DEFAULTS = OBJECTIVE.coefficients
CASES = {
    "ppo_clip": ("ppo_clip", {}),
    "ppo_clip, no lower bound": ("ppo_clip", {"clip_low": 1.0}),
    "ppo_clip, no bounds": ("ppo_clip", {"clip_low": 1.0, "clip_high": inf}),
    "ppo_clip, no room": ("ppo_clip", {"clip_low": 0.0, "clip_high": 0.0}),
    "dual clip": ("ppo_clip", {"dual_clip": 3.0}),
    "delta": ("ppo_clip", {"delta": 4.0}),
    "delta next to the clip": ("ppo_clip", {"delta": 1.3}),
    "dual clip and delta": ("ppo_clip", {"dual_clip": 2.0, "delta": 4.0}),
    "log ratio clamp": ("ppo_clip", {"log_ratio_low": 0.1, "log_ratio_high": 0.1}),
    "log ratio clamp, one side": ("ppo_clip", {"log_ratio_high": 0.1, "dual_clip": 3.0}),
    "log ratio clamp, two bounds": ("sapo", {"log_ratio_low": 0.4, "log_ratio_high": 0.1}),
    "cispo": ("cispo", {"clip_low": 1.0, "clip_high": 4.0}),
    "cispo, both bounds": ("cispo", {}),
    "cispo, no bounds": ("cispo", {"clip_low": 1.0, "clip_high": inf}),
    "sapo": ("sapo", {}),
    "sapo, sharp": ("sapo", {"sapo_temperature_pos": 10.0, "sapo_temperature_neg": 0.1}),
    "sapo, steep": ("sapo", {"sapo_temperature_pos": 1e3, "sapo_temperature_neg": 2e3}),
    "gmpo": ("gmpo", {"clip_low": 0.4, "clip_high": 0.4}),
    "gmpo, no upper bound": ("gmpo", {"clip_low": 0.4, "clip_high": inf}),
    "reinforce": ("reinforce", {}),
}
BOUNDS = (0.8, 1.28, 1.0, 1.1, 2.0, 3.0, 4.0, 5.0)
KINKS = [math.log(bound) for bound in BOUNDS] + [0.1, -0.1, 0.4, -0.4]
NEXT_TO_KINKS = [math.nextafter(kink, side) for kink in KINKS for side in (-inf, inf)]
EXTREMES = [80.0, -80.0, math.nextafter(80, 99), -math.nextafter(80, 99), 200.0, -200.0, 1e30]
LOG_RATIOS = [*KINKS, *NEXT_TO_KINKS, *EXTREMES, *torch.linspace(-3, 3, 61).tolist()]
KL_POINTS = [0.0, 0.5, -0.5, 1.0, -1.0, 40.0, -40.0, math.nextafter(40, 99)]
ADVANTAGES = (0.0, 1.0, -1.0, 0.2, -0.2, 1e-8, -3e4)


def by_reference(surrogate, c, log_ratio, advantages, logprobs):
    """Loss, slope and clip of each point, from the reference formulas and autograd."""
    d = log_ratio.clone().requires_grad_()
    current = logprobs.clone().requires_grad_()
    x = objectives.saturate(d, c.log_ratio_low, c.log_ratio_high)
    if surrogate == "gmpo":
        x, clip = objectives.gmpo_log_ratio(x, advantages, c)
        loss = objectives.gmpo(x, advantages)
    else:
        loss, clip = objectives.SURROGATES[surrogate](current, x, advantages, c)
    slope = torch.autograd.grad(loss.sum(), (d, current), allow_unused=True)
    return loss.detach(), next(part for part in slope if part is not None), clip


def assert_same(actual, expected, points, size=1.0):
    error = (actual - expected).abs() / torch.maximum(expected.abs(), torch.as_tensor(size))
    error = torch.where(actual == expected, 0.0, error)
    worst = int(error.argmax())
    assert error[worst] <= 1e-12, f"at {points(worst)}: {actual[worst]} is not {expected[worst]}"


@pytest.mark.parametrize("case", CASES)
def test_cpp_equals_the_reference_at_every_point(compiled, case):
    surrogate, changes = CASES[case]
    c = DEFAULTS._replace(**changes)
    grid = torch.cartesian_prod(
        torch.tensor(LOG_RATIOS, dtype=torch.float64), torch.tensor(ADVANTAGES).double()
    )
    log_ratio, advantages = (column.contiguous() for column in grid.t())
    logprobs = -torch.rand(len(grid), dtype=torch.float64) * 5
    loss, slope, clip, _, _ = torch.ops.fastrl.objective_eval(
        logprobs,
        log_ratio,
        advantages,
        logprobs,
        *OBJECTIVE._replace(surrogate=SURROGATES.index(surrogate), coefficients=c),
    )
    expected = by_reference(surrogate, c, log_ratio, advantages, logprobs)

    def points(i):
        return f"log ratio {log_ratio[i]!r}, advantage {advantages[i]}"

    for actual, wanted in zip((loss, slope, clip), expected, strict=True):
        assert_same(actual, wanted.double(), points)


@pytest.mark.parametrize("kl_clamp", [inf, 0.5])
@pytest.mark.parametrize("gradient", KL_GRADIENTS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_cpp_kl_equals_the_reference_at_every_point(compiled, estimator, gradient, kl_clamp):
    differences = torch.tensor([*LOG_RATIOS, *KL_POINTS], dtype=torch.float64)
    ratios = torch.tensor([0.0, 0.3, -0.3, 40.0, -40.0, *EXTREMES], dtype=torch.float64)
    grid = torch.cartesian_prod(differences, ratios)
    difference, log_ratio = (column.contiguous() for column in grid.t())
    zeros = torch.zeros_like(difference)
    c = DEFAULTS._replace(kl_clamp=kl_clamp, log_ratio_high=60.0)
    objective = OBJECTIVE._replace(
        kl_estimator=KL_ESTIMATORS.index(estimator),
        kl_gradient=KL_GRADIENTS.index(gradient),
        coefficients=c,
    )
    *_, kl, slope = torch.ops.fastrl.objective_eval(zeros, log_ratio, zeros, difference, *objective)
    logprobs = zeros.clone().requires_grad_()
    held = objectives.saturate(log_ratio + logprobs, c.log_ratio_low, c.log_ratio_high)
    expected = objectives.kl_term(logprobs, difference, held, estimator, gradient, kl_clamp)
    expected_slope = torch.autograd.grad(expected.sum(), logprobs)[0]
    assert expected_slope.isfinite().all()
    # the two parts of a bias-corrected slope may cancel: what counts is their size
    size = torch.ones_like(difference)
    if gradient == "bias-corrected":
        bounded = log_ratio.clamp(-40, 40).exp()
        size = 1 + bounded * (1 + difference.clamp(-40, 40).abs().exp())
    for actual, wanted in ((kl, expected.detach()), (slope, expected_slope)):
        assert_same(actual, wanted, lambda i: f"{difference[i]!r}, {log_ratio[i]!r}", size)


KL_ALONE = {"surrogate": "reinforce", "kl_coef": 1.0}
SLOPES = {
    "ppo_clip": {"clip_low": 1.0, "clip_high": 1e9},
    "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 1e9},
    "sapo": {"surrogate": "sapo", "sapo_temperature_pos": 5.0, "sapo_temperature_neg": 0.1},
    "sapo, steep": {
        "surrogate": "sapo",
        "sapo_temperature_pos": 1e4,
        "sapo_temperature_neg": 1e4,
    },
    **{f"{k}, exact": {**KL_ALONE, "kl_estimator": k} for k in KL_ESTIMATORS},
    "k3, bias-corrected": {**KL_ALONE, "kl_gradient": "bias-corrected"},
}


@pytest.mark.parametrize("case", SLOPES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_slope_in_float32_has_its_digits_wherever_it_is_small(backend, case, advantage):
    options, kl = SLOPES[case], "kl_coef" in SLOPES[case]
    sizes = torch.logspace(-6, 1.3, 200)
    old = torch.full((1, 400), -2.0)
    current = old + torch.cat([sizes, -sizes])

    def slope(dtype, backend):
        logprobs = current.clone().to(dtype).requires_grad_()
        fastrl.policy_loss(
            logprobs,
            torch.full((1,), 0.0 if kl else advantage, dtype=dtype),
            torch.ones(1, 400),
            old_logprobs=old.to(dtype),
            ref_logprobs=old.to(dtype) if kl else None,
            objective=fastrl.Objective(aggregation="token-sum", **options),
            backend=backend,
        ).loss.backward()
        return logprobs.grad.double()

    came, wanted = slope(torch.float32, backend), slope(torch.float64, "reference")
    # Ten roundings of the result, and in exponents those of the log-ratio d and of tau (e^d - 1).
    d = (current - old).double().abs()
    roundings = 10 + d
    if "sapo" in case:
        tau = options[f"sapo_temperature_{'pos' if advantage > 0 else 'neg'}"]
        roundings += tau * (4 + d) * torch.expm1((current - old).double()).abs()
        roundings += tau * d * (current - old).double().exp()
    smallest = 1e-36  # the range of float32
    error = (came - wanted).abs() / (2**-24 * roundings * wanted.abs() + smallest)
    worst = int(error.argmax())
    assert error.max() <= 1, f"{came[0, worst]} is not {wanted[0, worst]}, d = {d[0, worst]}"


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_slope_of_the_bias_corrected_k3_is_the_distance(backend, level):
    """r (dk + k) = -r d, without the parts of size e^d; also of a sequence of one token."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    distance = torch.tensor([[0.5], [-2.0], [12.0], [17.0]], dtype=dtype)
    logprobs = torch.full((4, 1), -1.0, dtype=dtype, requires_grad=True)
    o = fastrl.Objective(level=level, kl_coef=1.0, kl_gradient="bias-corrected")
    given = {"old_logprobs": logprobs.detach(), "ref_logprobs": logprobs.detach() + distance}
    mask, zero = torch.ones(4, 1), torch.zeros(4, dtype=dtype)
    fastrl.policy_loss(logprobs, zero, mask, **given, objective=o, backend=backend).loss.backward()
    torch.testing.assert_close(4 * logprobs.grad, -distance, rtol=1e-5, atol=0)


def one_token(backend, log_ratio, advantage, logprob=0.0, **options):
    """Loss, gradient and metrics of a single token."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    logprobs = torch.full((1, 1), logprob, dtype=dtype, requires_grad=True)
    result = fastrl.policy_loss(
        logprobs,
        torch.full((1,), advantage, dtype=dtype),
        torch.ones(1, 1),
        old_logprobs=logprobs.detach() - log_ratio,
        objective=fastrl.Objective(aggregation="token-sum", **options),
        backend=backend,
    )
    result.loss.backward()
    return result.loss.item(), logprobs.grad.item(), result.metrics


def test_the_ratio_of_two_log_probabilities_by_hand(backend):
    old, current = torch.tensor([[-2.1]]), torch.tensor([[-1.8]])
    one = torch.ones(1, 1)
    result = fastrl.policy_loss(current, one, one, old_logprobs=old, backend=backend)
    assert result.metrics["ratio_mean"].item() == pytest.approx(1.35, abs=1e-3)


GMPO = {"surrogate": "gmpo", "level": "sequence", "clip_low": 0.4, "clip_high": 0.4}

# objective, ratio, advantage, logprob, loss, gradient: from the papers' formulas, by hand
BY_HAND = [
    ({}, 1.35, 0.2, 0.0, -0.24, 0.0),  # min(0.27, 0.24)
    ({}, 1.35, -0.2, 0.0, 0.27, 0.27),  # min(-0.27, -0.24)
    ({}, 0.5, 2.0, 0.0, -1.0, -1.0),  # min(1, 1.6)
    ({}, 0.5, -2.0, 0.0, 1.6, 0.0),  # min(-1, -1.6)
    ({"clip_high": 0.4}, 1.35, 0.2, 0.0, -0.27, -0.27),
    ({"dual_clip": 3.0}, 5.0, -1.0, 0.0, 3.0, 0.0),  # max(-5, -3)
    ({"dual_clip": 3.0}, 2.0, -1.0, 0.0, 2.0, 2.0),
    ({"dual_clip": 3.0}, 5.0, 1.0, 0.0, -1.2, 0.0),
    ({"delta": 4.0}, 5.0, -1.0, 0.0, 4.0, 0.0),  # min(5, 4) * -1
    ({"delta": 4.0}, 3.0, -1.0, 0.0, 3.0, 3.0),
    ({"delta": 4.0}, 5.0, 1.0, 0.0, -1.2, 0.0),
    ({"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}, 8.0, 0.5, -2.0, 5.0, -2.5),
    ({"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}, 2.0, 0.5, -2.0, 2.0, -1.0),
    ({"surrogate": "cispo", "clip_low": 0.2, "clip_high": 4.0}, 0.5, 1.0, -2.0, 1.6, -0.8),
    ({"surrogate": "cispo", "clip_low": 1.0, "clip_high": -0.8}, 3.0, 0.5, -2.0, 0.2, -0.1),
    # sigmoid(1) = 0.7310586, times its complement 0.1966119
    ({"surrogate": "sapo"}, 2.0, 1.0, 0.0, -2.9242344, -1.5728955),
    # sigmoid(1.05) = 0.7407749, times its complement 0.1920274; 4 / 1.05 = 3.8095238
    ({"surrogate": "sapo"}, 2.0, -1.0, 0.0, 2.8219996, 1.5362196),
    ({"surrogate": "reinforce"}, 3.0, 0.5, -2.0, 1.0, -0.5),
    # one token is its own geometric mean: e^0.4 = 1.4918247
    (GMPO, 3.0, 1.0, 0.0, -1.4918247, 0.0),
    (GMPO, 3.0, -1.0, 0.0, 3.0, 3.0),
    ({"log_ratio_clamp": 0.5}, 3.0, -1.0, 0.0, 1.6487213, 0.0),  # e^0.5
]


@pytest.mark.parametrize(("options", "ratio", "advantage", "logprob", "loss", "slope"), BY_HAND)
def test_numbers_by_hand(backend, options, ratio, advantage, logprob, loss, slope):
    came = one_token(backend, math.log(ratio), advantage, logprob, **options)
    assert came[0] == pytest.approx(loss, rel=1e-6)
    assert came[1] == pytest.approx(slope, rel=1e-6)


# clip_low, clip_high: which bound acts, by the sign of the advantage
FLAGS = [
    ({}, 1.35, 0.2, 0, 1),
    ({}, 1.35, -0.2, 0, 0),
    ({}, 0.5, 0.2, 0, 0),
    ({}, 0.5, -0.2, 1, 0),
    ({}, 1.35, 0.0, 0, 0),
    ({"dual_clip": 3.0}, 5.0, -1.0, 0, 1),
    ({"delta": 4.0}, 5.0, -1.0, 0, 1),
    ({"surrogate": "cispo"}, 1.35, -0.2, 0, 1),
    ({"surrogate": "cispo"}, 0.5, 0.2, 1, 0),
    ({"surrogate": "cispo"}, 0.5, 0.0, 0, 0),
    ({"surrogate": "sapo"}, 9.0, 1.0, 0, 0),
    ({"surrogate": "reinforce"}, 9.0, 1.0, 0, 0),
    ({"surrogate": "gmpo", "level": "sequence"}, 1.35, 1.0, 0, 1),
    ({"surrogate": "gmpo", "level": "sequence"}, 0.5, -1.0, 1, 0),
]


@pytest.mark.parametrize(("options", "ratio", "advantage", "low", "high"), FLAGS)
def test_clip_metrics_say_which_bound_acts(backend, options, ratio, advantage, low, high):
    _, _, metrics = one_token(backend, math.log(ratio), advantage, **options)
    came = [metrics[name].item() for name in ("clip_low", "clip_high", "clip_fraction")]
    assert came == [low, high, low + high]


def test_two_tokens_of_gspo_by_hand(backend):
    # log ratios 0.2 and 0.4: the sequence's ratio is e^0.3 = 1.3498588, each token gets half
    logprobs = torch.zeros(1, 2, requires_grad=True)
    result = fastrl.policy_loss(
        logprobs,
        torch.tensor([2.0]),
        torch.ones(1, 2),
        old_logprobs=torch.tensor([[-0.2, -0.4]]),
        objective=fastrl.Objective.preset("gspo", clip_high=0.5),
        backend=backend,
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-2.6997176, rel=1e-6)
    assert logprobs.grad.tolist() == [pytest.approx([-1.3498588] * 2, rel=1e-6)]


def test_two_tokens_of_gmpo_by_hand(backend):
    # log ratios 0.2 and 0.9, the second held at 0.4 and without gradient: e^0.3
    logprobs = torch.zeros(1, 2, requires_grad=True)
    result = fastrl.policy_loss(
        logprobs,
        torch.tensor([2.0]),
        torch.ones(1, 2),
        old_logprobs=torch.tensor([[-0.2, -0.9]]),
        objective="gmpo",
        backend=backend,
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-2.6997176, rel=1e-6)
    assert logprobs.grad.tolist() == [pytest.approx([-1.3498588, 0.0], rel=1e-6)]
