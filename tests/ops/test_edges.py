"""Corner cases where a wrong result would go unnoticed; each was wrong once."""

import itertools
import math

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.contract import KL_ESTIMATORS, KL_GRADIENTS

pytestmark = pytest.mark.kernels

ONE, PAIR = torch.ones(1), torch.ones(1, 2)
PRESETS = ["dapo", "gspo", "gmpo", "cispo", "sapo", "reinforce"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_broken_token_on_policy_breaks_loss_and_gradient(backend, preset):
    """The ratio is 1 by definition on policy, which must not hide that something is NaN."""
    logprobs = torch.tensor([[-1.5, -1.0]], requires_grad=True)
    broken = torch.tensor([math.nan])
    result = fastrl.policy_loss(logprobs, broken, PAIR, objective=preset, backend=backend)
    result.loss.backward()
    assert torch.isnan(result.loss)
    assert torch.isnan(logprobs.grad).all()
    logprobs = torch.tensor([[math.nan, -1.0]], requires_grad=True)
    result = fastrl.policy_loss(logprobs, ONE, PAIR, objective=preset, backend=backend)
    result.loss.backward()
    assert torch.isnan(result.loss)
    assert torch.isnan(logprobs.grad[0, 0])
    assert all(result.metrics[name].isnan() for name in ("kl_old", "ratio_mean", "ratio_max"))
    logits = torch.zeros(1, 2, 3)
    logits[0, 0] = math.nan
    logits.requires_grad_()
    ids = torch.tensor([[0, 1]])
    result = fastrl.logits_policy_loss(logits, ids, ONE, PAIR, objective=preset, backend=backend)
    assert torch.isnan(result.loss)


@pytest.mark.parametrize("gradient", KL_GRADIENTS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_a_broken_reference_breaks_loss_and_gradient(backend, estimator, gradient):
    logprobs = torch.tensor([[-1.5, -1.0]], requires_grad=True)
    result = fastrl.policy_loss(
        logprobs,
        ONE,
        PAIR,
        ref_logprobs=torch.tensor([[math.nan, -1.0]]),
        objective=Objective(kl_coef=0.1, kl_estimator=estimator, kl_gradient=gradient),
        backend=backend,
    )
    result.loss.backward()
    assert torch.isnan(result.loss)
    assert logprobs.grad.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("old", [None, torch.tensor([[-1.0, -1.0]])])
def test_a_broken_row_without_advantage_breaks_the_linear_loss_too(backend, old):
    hidden = torch.randn(1, 2, 4)
    hidden[0, 0] = math.nan
    hidden.requires_grad_()
    weight = torch.randn(5, 4, requires_grad=True)
    advantages, ids = torch.tensor([[0.0, 1.0]]), torch.tensor([[0, 1]])
    result = fastrl.linear_policy_loss(
        hidden, weight, ids, advantages, PAIR, old_logprobs=old, objective="dapo", backend=backend
    )
    result.loss.backward()
    assert torch.isnan(result.loss)
    assert torch.isnan(weight.grad).any()


def test_an_impossible_token_on_policy_has_ratio_one(backend):
    logprobs = torch.tensor([[-math.inf, -1.0]])
    result = fastrl.policy_loss(logprobs, ONE, PAIR, objective="dapo", backend=backend)
    assert result.loss == -1
    assert result.metrics["ratio_mean"] == 1


def test_a_function_with_an_infinite_slope_at_zero_leaves_masked_tokens_alone():
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)

    def unlikelihood(new, old, ref, advantages):
        return -advantages * torch.log(1 - new.exp())

    mask = torch.tensor([[1, 0]])
    fastrl.policy_loss(logprobs, ONE, mask, objective=unlikelihood).loss.backward()
    assert logprobs.grad[0, 1] == 0
    assert torch.isfinite(logprobs.grad).all()


def test_a_bool_mask_of_other_bytes_means_what_torch_reads(backend):
    mask = torch.frombuffer(bytearray([2, 2, 0, 255]), dtype=torch.bool)[None]
    result = fastrl.policy_loss(torch.zeros(1, 4), ONE, mask, objective="ppo", backend=backend)
    assert result.loss.item() == -1.0
    assert result.metrics["active_tokens"].item() == 3
    logits, ids = torch.zeros(1, 4, 3), torch.zeros(1, 4, dtype=torch.int64)
    logprobs = fastrl.token_logprobs(logits, ids, mask=mask, backend=backend)
    assert ((logprobs != 0) == mask).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16])
def test_ids_of_any_integer_dtype(backend, dtype):
    logits, ids = torch.randn(1, 2, 300), torch.tensor([[156, 3]])
    expected = fastrl.token_logprobs(logits, ids, backend=backend)
    actual = fastrl.token_logprobs(logits, ids.to(dtype), backend=backend)
    assert torch.equal(actual, expected)


def test_lora_under_autocast(backend):
    hidden, weight, ids = torch.randn(3, 8), torch.randn(11, 8), torch.tensor([1, 2, 3])
    lora = (torch.randn(2, 8), torch.randn(11, 2), 0.5)
    expected = fastrl.linear_token_logprobs(hidden, weight, ids, lora=lora, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        actual = fastrl.linear_token_logprobs(hidden, weight, ids, lora=lora, backend=backend)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fill", [-1e9, -1e10, -1e20, -1e30, -1e38, "lowest"])
def test_logits_filled_far_below_the_others(backend, fill, dtype):
    """As a mask over the vocabulary does: parts of a row have no other logits."""
    fill = torch.finfo(dtype).min if fill == "lowest" else fill
    logits = torch.full((1, 2, 1500), fill)
    logits[..., 700:705] = torch.randn(2, 5)
    logits = logits.to(dtype)
    ids = torch.tensor([[700, 704]])
    outcomes = []
    for given, name in ((logits, backend), (logits.double(), "reference")):
        leaf = given.clone().requires_grad_()
        stats = fastrl.token_stats(leaf, ids, temperature=2.0, backend=name)
        (stats.logprobs + stats.entropy).sum().backward()
        outcomes.append([stats.logprobs.detach(), stats.entropy.detach(), leaf.grad])
    for found, wanted in zip(*outcomes, strict=True):
        tolerance = 4e-3 if found.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=1e-5)


def test_a_softcap_holds_the_lowest_finite_logit(backend):
    logits = torch.tensor([[1.0, torch.finfo(torch.float32).min, 0.0]])
    actual = fastrl.token_logprobs(logits, torch.tensor([0]), logit_softcap=0.5, backend=backend)
    exact = (0.5 * torch.tanh(logits.double() / 0.5)).log_softmax(-1)[:, 0]
    assert abs(actual - exact) <= 1e-6


def test_bootstrap_values_per_token_win_where_both_shapes_fit(backend):
    zeros, bounds = torch.zeros(2), torch.tensor([0, 2, 2], dtype=torch.int32)
    options = {"gamma": 1.0, "lam": 1.0, "cu_seqlens": bounds, "backend": backend}
    returns = fastrl.gae(zeros, zeros, bootstrap_values=torch.tensor([5.0, 7.0]), **options).returns
    assert returns.tolist() == [7.0, 7.0]


def test_a_float64_temperature_keeps_its_digits():
    logits, ids = torch.randn(2, 5, dtype=torch.float64), torch.tensor([0, 1])
    as_tensor = torch.tensor(0.7, dtype=torch.float64)
    expected = fastrl.token_logprobs(logits, ids, temperature=0.7)
    assert torch.equal(fastrl.token_logprobs(logits, ids, temperature=as_tensor), expected)


@pytest.mark.not_on("cuda")  # nobody looks at the values of normalizers on a GPU
def test_a_count_of_zero_is_a_fine_normalizer_of_nothing(backend):
    mask = torch.zeros(1, 2)
    logprobs = torch.zeros(1, 2, requires_grad=True)
    for o in ("dapo", "grpo", Objective.preset("grpo", convention="trl")):  # it counts empty ones
        loss = fastrl.policy_loss(
            logprobs, ONE, mask, objective=o, normalizer=mask.sum(), backend=backend
        ).loss
        assert loss == 0
    if backend != "triton":  # kernels for a GPU do not check its value
        with pytest.raises(ValueError, match="normalizer must be above 0"):
            fastrl.policy_loss(logprobs, ONE, PAIR, normalizer=mask.sum(), backend=backend)


@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_a_broken_rollout_logprob_is_seen(backend, kind):
    objective = Objective(rollout_correction=RolloutCorrection(kind=kind))
    logprobs = torch.tensor([[-1.0, -1.0]])
    rollout = torch.tensor([[math.nan, -1.0]])
    result = fastrl.policy_loss(
        logprobs, ONE, PAIR, rollout_logprobs=rollout, objective=objective, backend=backend
    )
    assert torch.isnan(result.loss)


ALL_BITS = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # a GPU's NaN


@pytest.mark.parametrize("broken", ["advantages", "old_logprobs", "ref_logprobs", "upstream"])
def test_a_nan_of_any_payload_fills_a_bfloat16_gradient(backend, broken):
    """Rounding it like a number would carry into the sign and give 0."""
    logits = torch.randn(1, 2, 64).bfloat16().requires_grad_()
    ids = torch.tensor([[3, 5]])
    per_token = {name: torch.full((1, 2), -1.0) for name in ("old_logprobs", "ref_logprobs")}
    per_token["advantages"] = torch.ones(1, 2)
    if broken == "upstream":
        logprobs = fastrl.token_logprobs(logits, ids, backend=backend)
        logprobs.backward(torch.stack([ALL_BITS, torch.ones(())])[None])
    else:
        per_token[broken][0, 0] = ALL_BITS
        objective = Objective(kl_coef=0.1, entropy_coef=0.1)
        fastrl.logits_policy_loss(
            logits, ids, mask=PAIR, objective=objective, backend=backend, **per_token
        ).loss.backward()
    assert logits.grad[0, 0].isnan().all()
    assert logits.grad[0, 1].isfinite().all()


def test_numbers_beyond_any_float_are_refused_by_name():
    with pytest.raises(ValueError, match="gamma must be finite"):
        fastrl.gae(PAIR, PAIR, gamma=10**400)


@pytest.mark.parametrize("shape", [(0, 2), (1, 0), (0,)])
def test_without_a_token_loss_and_gradients_are_zero(backend, shape):
    """Also with prompts to count, and logits with meaningless strides."""
    prompts = {"group_size": 1, "objective": fastrl.Objective(aggregation="prompt-mean")}
    cut = {"cu_seqlens": torch.zeros(1, dtype=torch.int32)} if len(shape) == 1 else {}
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.ones(shape)
    advantages = torch.zeros(shape[0] if len(shape) == 2 else 0)
    whole = torch.zeros(*shape, 6, requires_grad=True)
    logprobs = torch.zeros(shape, requires_grad=True)
    weight = torch.zeros(3, 3, requires_grad=True)
    for options in ({}, prompts):
        given = {"backend": backend, **cut, **options}
        losses = [
            fastrl.policy_loss(logprobs, advantages, mask, **given),
            fastrl.logits_policy_loss(whole[..., ::2], ids, advantages, mask, **given),
            fastrl.linear_policy_loss(whole[..., ::2], weight, ids, advantages, mask, **given),
        ]
        sum(result.loss for result in losses).backward()
        assert all(result.loss == 0 for result in losses)
        assert all((x.grad == 0).all() for x in (whole, logprobs, weight))


def test_a_weight_of_zero_is_no_reason_to_project_a_row(backend):
    """The ratio of a row that was not projected may overflow with its advantage."""
    hidden, weight = torch.tensor([[-300.0], [1.0]]), torch.tensor([[1.0], [-1.0]])
    ids, mask = torch.tensor([0, 0]), torch.ones(2)
    advantages, old = torch.tensor([-1e6, 1.0]), torch.tensor([-600.0, -0.125])
    losses = [
        fastrl.linear_policy_loss(
            hidden.clone().requires_grad_(),
            weight,
            ids,
            advantages,
            mask,
            old_logprobs=old,
            policy_weights=torch.tensor([0.0, 1.0]),
            objective="ppo",
            metrics=metrics,
            backend=backend,
        ).loss
        for metrics in (True, False)
    ]
    assert losses[0].isfinite()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_entry_leaves_masked_ones_zero(shift_mean, broken):
    x, mask = torch.tensor([1.0, broken, 3.0]), torch.tensor([1, 1, 0])
    white = fastrl.whiten(x, mask, shift_mean=shift_mean)
    assert white[:2].isnan().all()
    assert white[2] == 0


@pytest.mark.parametrize("estimator", fastrl.contract.KL_ESTIMATORS)
@pytest.mark.parametrize("ref", [-1.0, math.nan, -math.inf])
def test_a_broken_log_probability_breaks_its_divergence(estimator, ref):
    logprobs = torch.tensor([math.nan, -1.0], requires_grad=True)
    refs = torch.tensor([ref, -1.25], requires_grad=True)
    kl = fastrl.kl_divergence(logprobs, refs, estimator=estimator)
    kl.sum().backward()
    assert kl[0].isnan()
    assert logprobs.grad[0].isnan()
    assert refs.grad[0] == 0 if math.isinf(ref) else refs.grad[0].isnan()
    assert all(x.grad[1].isfinite() for x in (logprobs, refs))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("advantage", [math.inf, -math.inf])
def test_a_weight_of_zero_drops_an_infinite_advantage(backend, preset, advantage):
    found = []
    for given in (advantage, math.copysign(1.0, advantage)):
        logprobs = torch.tensor([[-2.0, -1.0]], requires_grad=True)
        result = fastrl.policy_loss(
            logprobs,
            torch.tensor([[given, 1.0]]),
            PAIR,
            policy_weights=torch.tensor([[0.0, 1.0]]),
            objective=preset,
            backend=backend,
        )
        result.loss.backward()
        found.append((result.loss.detach(), logprobs.grad))
        logits = torch.zeros(1, 2, 3, requires_grad=True)
        result = fastrl.logits_policy_loss(
            logits,
            torch.tensor([[0, 1]]),
            torch.tensor([[given, 1.0]]),
            PAIR,
            policy_weights=torch.tensor([[0.0, 1.0]]),
            objective=preset,
            backend=backend,
        )
        result.loss.backward()
        found[-1] += (result.loss.detach(), logits.grad)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert all(x.isfinite().all() for x in found[0])


def test_scalings_at_their_bounds(backend):
    logits, ids = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([0])
    sizes = (1e-30, 1e-10, 1.0, 1e10, 1e30)
    for scale, softcap, temperature in itertools.product(sizes, (None, *sizes), sizes):
        beside = [scale, temperature, 1.0] + ([] if softcap is None else [softcap])
        if max(beside) / min(beside) > 1.0001e30:
            continue
        if backend in ("triton", "cuda") and softcap is not None and softcap > 1e3 * scale:
            continue  # its tanh has an absolute error of 2^-22, and the logits this times softcap
        if backend == "cuda" and max(scale, softcap or 0.0) > 1e15 * temperature:
            continue  # the gradient of the entropy has a factor there that no float32 holds
        found = []
        for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
            leaf = logits.to(dtype, copy=True).requires_grad_()
            stats = fastrl.token_stats(
                leaf,
                ids,
                temperature=temperature,
                logit_scale=scale,
                logit_softcap=softcap,
                backend=name,
            )
            (stats.logprobs + stats.entropy).sum().backward()
            found.append([stats.logprobs.detach(), stats.entropy.detach(), leaf.grad])
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-6)


def test_the_slope_of_a_softcap_has_its_digits_next_to_the_cap(backend):
    softcap, token_ids = 2.0, torch.zeros(1, 24, dtype=torch.int64)
    logits = torch.zeros(1, 24, 5)
    logits[0, :, 0] = torch.arange(24) - 12.0  # 1 - tanh^2 is down to 2e-5

    def gradient(dtype, backend):
        leaf = logits.to(dtype, copy=True).requires_grad_()
        options = {"logit_softcap": softcap, "backend": backend}
        fastrl.token_logprobs(leaf, token_ids, **options).sum().backward()
        return leaf.grad.double()[..., 0]

    came, wanted = gradient(torch.float32, backend), gradient(torch.float64, "reference")
    # ten roundings, 12 of the exponent 2 x, and 1 - p, which is above 1 / 3
    assert (came - wanted).abs().le(25 * 2**-24 * wanted.abs()).all(), came / wanted - 1


@pytest.mark.parametrize("backend", ["cpu", "reference"])  # Triton has them up to 15 nats
@pytest.mark.parametrize("lead", [12.0, 17.0])
def test_a_likely_token_has_its_digits(backend, lead):
    """1 - p, which float32 has not where p is nearly 1."""

    def found(dtype, backend):
        leaf = torch.tensor([[lead, 0.0, -1.0]], dtype=dtype, requires_grad=True)
        more = {"outputs": ("logprobs", "entropy"), "backend": backend}
        stats = fastrl.token_stats(leaf, torch.zeros(1, dtype=torch.int64), **more)[:2]
        gradients = [torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in stats]
        return torch.cat([*stats, *(x.flatten() for x in gradients)]).double()

    wanted = found(torch.float64, "reference")
    assert wanted[0].item() == pytest.approx(-math.log1p(math.exp(-lead) + math.exp(-lead - 1)))
    torch.testing.assert_close(found(torch.float32, backend), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_first_of_many_equal_logits_has_its_digits(backend):
    """As a sum over the other tokens, its gradient of -1 / 50 would be a small difference."""
    leaf = torch.zeros(1, 50, requires_grad=True)
    fastrl.token_logprobs(leaf, torch.ones(1, dtype=torch.int64), backend=backend).backward()
    assert leaf.grad[0, 0].item() == pytest.approx(-0.02, rel=1e-6)
