"""The CUDA kernels of the one-pass policy loss, run on a CPU, against the reference in float64."""

import pytest
import torch

from fastrl.ops._loss.slopes import TokenSlopes
from tests.support import cuda_vocabulary as kernels
from tests.support.cuda_rows import CASES, assert_gradient, exact, gradient, make_rows

# (ratio, KL estimator, KL gradient), coefficients, which optional inputs there are
OBJECTIVES = {
    "ppo": ((0, 2, 0), {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}, "old"),
    "everything": (
        (0, 2, 2),
        {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.1, "entropy_coef": 0.02},
        "old ref kl_weights entropy_weights",
    ),
    "cispo": ((1, 0, 1), {"clip_low": 1.0, "clip_high": 0.1, "kl_coef": 0.3}, "old ref"),
    "sapo": ((2, 3, 0), {"kl_coef": 0.1, "kl_clamp": 2.0, "log_ratio_low": 1.0}, "old ref"),
    "on policy": ((0, 2, 0), {"clip_low": 0.2, "clip_high": 0.2, "entropy_coef": 0.1}, ""),
    "reinforce": ((4, 1, 0), {"kl_coef": 0.2}, "ref entropy_weights"),
}


def policy_inputs(logprobs, given):
    """Advantages, weights, KL and entropy weights, old and reference log-probabilities."""
    noise = [torch.randn_like(logprobs) for _ in range(4)]
    logprobs = logprobs.nan_to_num(0.0)
    inputs = {
        "advantages": noise[0],
        "weights": noise[1].abs(),
        "kl_weights": noise[2].abs(),
        "entropy_weights": noise[3].abs(),
        "old": logprobs + 0.3 * noise[1],
        "ref": logprobs + 0.3 * noise[2],
    }
    required = ("advantages", "weights")
    return [x if k in required or k in given.split() else None for k, x in inputs.items()]


def loss_gradient(logits, token_ids, active, inputs, kinds, numbers, **options):
    """The exact gradient of the loss and the magnitude of its parts."""
    stats = exact(logits, token_ids, active, **options)
    flat = [None if x is None else x.double().flatten() for x in inputs]
    slopes = TokenSlopes("reference", active.flatten(), *flat, *kinds, numbers)
    slope, entropy_slope = slopes.of(stats[0].flatten(), stats[1].flatten(), slice(None))
    zero = torch.zeros(token_ids.shape)
    flows = [zero if x is None else x.view(token_ids.shape) for x in (slope, entropy_slope)]
    expected, size = gradient(logits, token_ids, active, (*flows, zero), **options)
    # the slope carries the rounding of the log-probability, which the parts of it multiply
    return expected, 8 * size + 2 * size.amax(-1, keepdim=True)


def one_pass(logits, token_ids, active, inputs, kinds, numbers, *, inplace, clusters, **options):
    logits = logits.clone() if inplace and logits.is_contiguous() else logits
    rows = kernels.rows_of(logits, token_ids, active, **options)
    grad = None if inplace else kernels.nan_like(logits.contiguous())
    stats = kernels.logits_policy_loss(rows, inputs, kinds, numbers, grad, clusters=clusters)
    return *stats, logits if inplace else grad


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("V", "beside"), [(1000, 0), (5001, 2)])
@pytest.mark.parametrize("clusters", [True, False])
def test_policy_loss_of_every_objective(name, V, beside, clusters):
    kinds, given, optional = OBJECTIVES[name]
    _, logits, token_ids, active = make_rows(V, beside, torch.float32)
    inputs = policy_inputs(exact(logits, token_ids, active)[0].float(), optional)
    numbers = kernels.coefficients(**given)
    arguments = (logits, token_ids, active, inputs, kinds, numbers)
    expected, size = loss_gradient(*arguments)
    _, _, grad = one_pass(*arguments, inplace=False, clusters=clusters)
    assert_gradient(grad, expected, size)


@pytest.mark.parametrize(("V", "beside", "dtype", "options"), CASES)
def test_policy_loss_of_every_shape(V, beside, dtype, options):
    kinds, given, optional = OBJECTIVES["everything"]
    whole, logits, token_ids, active = make_rows(V, beside, dtype)
    inputs = policy_inputs(exact(logits, token_ids, active, **options)[0].float(), optional)
    arguments = (token_ids, active, inputs, kinds, kernels.coefficients(**given))
    expected, size = loss_gradient(logits, *arguments, **options)
    rows = kernels.rows_of(logits, token_ids, active, **options)
    stats = kernels.token_stats(rows, token_ids)
    grads = []
    for clusters in (True, False):
        lp, entropy, grad = one_pass(
            logits, *arguments, inplace=False, clusters=clusters, **options
        )
        # a ratio to the log-probabilities of an earlier call is exactly 1
        assert torch.equal(lp, stats[0])
        assert torch.equal(entropy, stats[1])
        grads.append(grad)
    assert_gradient(grads[0], expected, size)
    assert not grads[0][~active].any()
    before = whole.clone()
    for clusters in (True, False):
        whole.copy_(before)
        one_pass(logits, *arguments, inplace=True, clusters=clusters, **options)
        grads.append(logits.clone())
        logits.copy_(before[:, :3, :V])
        assert torch.equal(whole.nan_to_num(7), before.nan_to_num(7))
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def everything(V, dtype, B, T, beside=0):
    kinds, given, optional = OBJECTIVES["everything"]
    _, logits, token_ids, active = make_rows(V, beside, dtype, B, T)
    inputs = policy_inputs(exact(logits, token_ids, active)[0].float(), optional)
    return logits, token_ids, active, inputs, kinds, kernels.coefficients(**given)


@pytest.mark.parametrize("V", [4096, 5001])
@pytest.mark.parametrize("clusters", [True, False])
def test_a_row_does_not_depend_on_the_others(V, clusters):
    logits, token_ids, active, inputs, *objective = everything(V, torch.bfloat16, 1, 90)
    active[0, 20:40] = False  # and on the turns that the others took
    *stats, grad = one_pass(
        logits, token_ids, active, inputs, *objective, inplace=False, clusters=clusters
    )
    for t in (0, 41, 77, 88):
        alone = [None if x is None else x[:, t : t + 1].clone() for x in inputs]
        row = (logits[:, t : t + 1].clone(), token_ids[:, t : t + 1].clone())
        *stat, one = one_pass(
            *row, active[:, t : t + 1].clone(), alone, *objective, inplace=False, clusters=clusters
        )
        assert torch.equal(one[0, 0], grad[0, t])
        assert all(torch.equal(x[0, 0], y[0, t]) for x, y in zip(stat, stats, strict=True))


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("V", [4096, 5001])
def test_broken_rows(V, clusters):
    nan, inf = float("nan"), float("inf")
    logits, token_ids, active, inputs, *objective = everything(V, torch.float32, 1, 8)
    logits = logits.clone()
    clean = one_pass(
        logits, token_ids, active, inputs, *objective, inplace=False, clusters=clusters
    )
    logits[0, 1, 3] = nan
    logits[0, 2, V - 1] = inf
    logits[0, 3] = -inf
    token_ids[0, 4] = V
    token_ids[0, 5] = -100
    logits[0, 6, V // 2 :] = -inf  # whole threads see nothing else
    token_ids[0, 6] = 5
    lp, entropy, grad = one_pass(
        logits, token_ids, active, inputs, *objective, inplace=False, clusters=clusters
    )
    assert lp[0, 1:6].isnan().all()
    assert entropy[0, 1:4].isnan().all()
    assert grad[0, 1:4].isnan().all()
    assert torch.equal(lp[0, 0], clean[0][0, 0])
    assert torch.equal(grad[0, 0], clean[2][0, 0])
    expected = exact(logits[:, 6:7], token_ids[:, 6:7], active[:, 6:7])
    assert abs(lp[0, 6] - expected[0]) < 2e-6
    assert abs(entropy[0, 6] - expected[1]) < 5e-6
    assert not grad[0, 6, V // 2 :].any()
    assert grad[0, 6].isfinite().all()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("clusters", [True, False])
def test_a_chosen_token_may_be_excluded(clusters, softcap):
    logits, token_ids, active, inputs, *_ = everything(5001, torch.float32, 1, 3)
    logits = logits.clone()
    logits[0, 0, token_ids[0, 0]] = -float("inf")
    numbers = kernels.coefficients(entropy_coef=0.1)
    arguments = (token_ids, active, inputs, (4, 0, 0), numbers)
    choice = {"inplace": False, "clusters": clusters, "logit_softcap": softcap or 0.0}
    lp, _, grad = one_pass(logits, *arguments, **choice)
    assert lp[0, 0] == -float("inf")
    assert grad[0, 0, token_ids[0, 0]] == 0
    assert lp[0, 1].isfinite()


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("V", [4096, 5001])
def test_a_common_offset_costs_nothing(V, clusters):
    logits, token_ids, active, inputs, *objective = everything(V, torch.float32, 1, 4)
    logits = (logits * 256).round() / 256  # so that adding 8192 is exact
    shifted = logits + 8192
    options = {"inplace": False, "clusters": clusters}
    plain = one_pass(logits, token_ids, active, inputs, *objective, **options)
    moved = one_pass(shifted, token_ids, active, inputs, *objective, **options)
    assert (moved[0] - plain[0]).abs().max() < 2e-6
    assert (moved[1] - plain[1]).abs().max() < 5e-6
    assert (moved[2] - plain[2])[active].abs().max() < 1e-5


@pytest.mark.parametrize("V", [4096, 5001])
@pytest.mark.parametrize("clusters", [True, False])
def test_rows_without_a_gradient_are_zeros(V, clusters):
    logits, token_ids, active, inputs, *_ = everything(V, torch.bfloat16, 1, 8)
    inputs[0][0, 1] = 0  # no advantage
    inputs[1][0, 2] = 0  # no weight
    inputs[2] = inputs[3] = None
    numbers = kernels.coefficients()
    arguments = (token_ids, active, inputs, (0, 2, 0), numbers)
    _, _, grad = one_pass(logits, *arguments, inplace=False, clusters=clusters)
    assert not grad[0, 1:3].any()
    assert not grad[~active].any()
    assert grad[0, 0].any()


@pytest.mark.parametrize(("V", "beside"), [(4096, 0), (5001, 2)])
@pytest.mark.parametrize("inplace", [True, False])
def test_each_logit_is_loaded_once_and_stored_once(V, beside, inplace):
    N = 90
    wide, _, active, inputs, *objective = everything(V + beside, torch.bfloat16, 1, N)
    wide = wide.contiguous()
    logits, token_ids = wide[..., :V], torch.randint(V, (1, N))
    rows = kernels.rows_of(logits, token_ids, active)
    loads, stores = kernels.watch(0, wide)
    grad = None
    if not inplace:
        grad = torch.empty_like(logits.contiguous())
        _, stores = kernels.watch(1, grad)
    try:
        kernels.logits_policy_loss(rows, inputs, *objective, grad, clusters=True)
    finally:
        kernels.stop_watching()
    loads, stores = loads.view(N, V + beside, 2), stores.view(N, -1, 2)
    assert (loads[: N - 1, :V] == 1).all()
    assert not loads[N - 1].any()  # not active
    assert not loads[:, V:].any()
    # the chosen token's own gradient is written over what its vector held
    chosen = torch.zeros(N, V, dtype=torch.bool).scatter_(1, token_ids[0][:, None], True)
    chosen &= active[0][:, None]
    assert (stores[:, :V] == torch.where(chosen[..., None], 2, 1)).all()
    assert not stores[:, V:].any()
