"""The one-pass loss from logits: the same numbers as its parts, its gradient against float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastrl
from fastrl import Objective, RolloutCorrection
from tests.ops.inputs import backend_for

pytestmark = pytest.mark.kernels

B, T = 3, 4
KL = Objective(kl_coef=0.1, entropy_coef=0.02)
OBJECTIVES = {
    "ppo": KL,
    "dual clip and delta": replace(KL, dual_clip=3.0, delta=1.5),
    "grpo": Objective.preset("grpo", kl_coef=0.1, kl_estimator="k2"),
    "dr_grpo": Objective.preset("dr_grpo", length_norm=7.0),
    "dapo": Objective.preset("dapo"),
    "gspo": Objective.preset("gspo", clip_low=0.2, clip_high=0.2, entropy_coef=0.02),
    "gmpo": Objective.preset("gmpo"),
    "cispo": Objective.preset("cispo", clip_high=0.1, kl_coef=0.1, kl_estimator="abs"),
    "sapo": Objective.preset("sapo", kl_coef=0.1, kl_estimator="k1"),
    "luspo": Objective.preset("luspo"),
    "reinforce": Objective.preset("reinforce", entropy_coef=0.1),
    "a function": Objective(surrogate=lambda new, old, ref, a: -(new - old).exp() * a + 0 * ref),
}


def batch(vocabulary=129, dtype=torch.float32):
    logits = (torch.randn(B, T, vocabulary) * 3).to(dtype)
    token_ids = torch.randint(vocabulary, (B, T))
    logprobs = fastrl.token_logprobs(logits, token_ids, backend="reference")
    return {
        "logits": logits,
        "token_ids": token_ids,
        "advantages": torch.tensor([1.5, -0.7, 0.4]),
        "mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]]),
        "old_logprobs": logprobs + 0.3 * torch.randn(B, T),
        "ref_logprobs": logprobs + 0.3 * torch.randn(B, T),
    }


def run(arguments, backend, objective, **options):
    """Loss, metrics and gradient of the logits."""
    arguments, backend = dict(arguments), backend_for(objective, backend)
    logits = arguments.pop("logits").detach().clone().requires_grad_()
    positional = [arguments.pop(name) for name in ("token_ids", "advantages", "mask")]
    result = fastrl.logits_policy_loss(
        logits, *positional, objective=objective, backend=backend, **arguments, **options
    )
    result.loss.backward()
    return result.loss.detach(), result.metrics, logits.grad


def in_float64(arguments):
    return {k: v.double() if v.is_floating_point() else v for k, v in arguments.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_metrics_and_gradient_agree_with_float64(backend, name, dtype):
    arguments = batch(dtype=dtype)
    loss, metrics, grad = run(arguments, backend, OBJECTIVES[name])
    exact_loss, exact_metrics, exact = run(in_float64(arguments), "reference", OBJECTIVES[name])
    assert abs(loss.double() - exact_loss) <= 2e-6 * max(1, abs(exact_loss))
    for key, value in metrics.items():
        assert abs(value.double() - exact_metrics[key]) <= 1e-5 * max(1, abs(exact_metrics[key])), (
            key
        )
    # one rounding of the gradient's dtype, and float32 roundings of ratio and probabilities
    eps = torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).smallest_normal * eps
    budget = eps * exact.abs() + 2e-6 * exact.abs().amax(-1, keepdim=True) + tiny
    assert ((grad.double() - exact).abs() <= budget).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 2, 50257, 151936])
def test_every_vocabulary(backend, vocabulary, dtype):
    arguments = batch(vocabulary, dtype)
    loss, _, grad = run(arguments, backend, KL, normalizer=5.0)
    exact_loss, _, exact = run(in_float64(arguments), "reference", KL, normalizer=5.0)
    assert abs(loss.double() - exact_loss) <= 5e-6 * max(1, abs(exact_loss))
    # the slope of a token carries the rounding of its ratio and of its KL, also where they cancel
    budget = torch.finfo(dtype).eps * exact.abs() + 4e-6 * exact.abs().amax()
    assert ((grad.double() - exact).abs() <= budget + 1e-9).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_equals_its_parts(backend, name):
    arguments = batch()
    loss, metrics, _ = run(arguments, backend, OBJECTIVES[name])
    logits, token_ids, advantages, mask, old, ref = arguments.values()
    backend = backend_for(OBJECTIVES[name], backend)
    stats = fastrl.token_stats(logits, token_ids, mask=mask, backend=backend)
    parts = fastrl.policy_loss(
        stats.logprobs,
        advantages,
        mask,
        old_logprobs=old,
        ref_logprobs=ref,
        entropy=stats.entropy,
        objective=OBJECTIVES[name],
        backend=backend,
    )
    assert torch.equal(loss, parts.loss)
    assert all(torch.equal(metrics[key], parts.metrics[key]) for key in metrics)


@pytest.mark.parametrize("garbage", [math.nan, 1e30, -math.inf])
@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_masked_tokens_are_inert(backend, name, garbage):
    clean = batch()
    clean["advantages"] = torch.randn(B, T)
    dirty = {k: v.clone() for k, v in clean.items()}
    masked = clean["mask"] == 0
    for key in ("logits", "advantages", "old_logprobs", "ref_logprobs"):
        dirty[key][masked] = garbage
    dirty["token_ids"][masked] = 10**6
    loss, metrics, grad = run(clean, backend, OBJECTIVES[name])
    loss_, metrics_, grad_ = run(dirty, backend, OBJECTIVES[name])
    assert torch.equal(loss, loss_)
    assert torch.equal(grad, grad_)
    assert all(torch.equal(metrics[key], metrics_[key]) for key in metrics)
    assert (grad_[masked] == 0).all()


def test_ignored_ids_count_as_masked(backend):
    arguments = batch()
    ignored = {**arguments, "mask": torch.ones(B, T), "token_ids": arguments["token_ids"].clone()}
    ignored["token_ids"][arguments["mask"] == 0] = -100
    loss, metrics, grad = run(arguments, backend, KL)
    loss_, metrics_, grad_ = run(ignored, backend, KL)
    assert torch.equal(loss, loss_)
    assert torch.equal(grad, grad_)
    assert torch.equal(metrics["active_tokens"], metrics_["active_tokens"])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_all_masked_batch_is_zero(backend, name):
    arguments = {**batch(), "mask": torch.zeros(B, T)}
    loss, metrics, grad = run(arguments, backend, OBJECTIVES[name])
    assert loss == 0
    assert (grad == 0).all()
    assert all(torch.isfinite(value) for value in metrics.values())


def test_no_rows(backend):
    logits = torch.zeros(0, 4, 9, requires_grad=True)
    empty = torch.zeros(0, 4)
    result = fastrl.logits_policy_loss(logits, empty.long(), torch.zeros(0), empty, backend=backend)
    result.loss.backward()
    assert result.loss == 0
    assert logits.grad.shape == (0, 4, 9)


def test_packed_equals_padded(backend):
    arguments = batch()
    rows = torch.tensor([4, 2, 3])
    mask = torch.arange(T) < rows[:, None]
    padded = {**arguments, "mask": mask}
    packed = {k: v[mask] if v.shape[:2] == (B, T) else v for k, v in padded.items()}
    packed["cu_seqlens"] = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    for name in ("ppo", "grpo", "gspo", "gmpo"):
        loss, metrics, grad = run(padded, backend, OBJECTIVES[name])
        loss_, metrics_, grad_ = run(packed, backend, OBJECTIVES[name])
        torch.testing.assert_close(loss, loss_, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(grad[mask], grad_, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(metrics, metrics_, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
def test_rollout_correction(backend, kind, level, on_policy, entropy_coef):
    arguments = batch()
    arguments["rollout_logprobs"] = arguments["old_logprobs"] + 0.3 * torch.randn(B, T)
    if on_policy:
        del arguments["old_logprobs"]
    correction = RolloutCorrection(kind=kind, level=level, low=0.7, high=1.4)
    objective = Objective(kl_coef=0.1, entropy_coef=entropy_coef, rollout_correction=correction)
    loss, metrics, grad = run(arguments, backend, objective)
    exact_loss, exact_metrics, exact = run(in_float64(arguments), "reference", objective)
    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=1e-6)
    for key, value in metrics.items():
        torch.testing.assert_close(value.double(), exact_metrics[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_upstream_scale_enters_the_gradient(backend, dtype):
    arguments = batch(dtype=dtype)
    logits = arguments["logits"].requires_grad_()
    rest = [arguments[name] for name in ("token_ids", "advantages", "mask")]
    grads = []
    for factor in (1.0, 0.25):
        loss = fastrl.logits_policy_loss(logits, *rest, backend=backend).loss
        grads.append(torch.autograd.grad(loss * factor, logits)[0])
    torch.testing.assert_close(grads[0] * 0.25, grads[1], rtol=0, atol=torch.finfo(dtype).tiny)


def test_fp16_gradients_that_would_underflow_survive_a_loss_scale(backend):
    logits = torch.zeros(1, 2, 4, dtype=torch.float16, requires_grad=True)
    token_ids, mask = torch.tensor([[0, 1]]), torch.ones(1, 2)
    tiny = torch.tensor([1e-9])
    loss = fastrl.logits_policy_loss(logits, token_ids, tiny, mask, backend=backend).loss
    (loss * 2.0**20).backward()
    expected = -1e-9 * 2.0**20 / 2 * 0.75
    assert abs(logits.grad[0, 0, 0].item() - expected) <= 1e-3 * abs(expected)


def test_gradients_with_a_retained_graph(backend):
    arguments = batch()
    logits = arguments["logits"].requires_grad_()
    rest = [arguments[name] for name in ("token_ids", "advantages", "mask")]
    loss = fastrl.logits_policy_loss(logits, *rest, backend=backend).loss * 2
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    kept = first.clone()
    second = torch.autograd.grad(loss, logits)[0]
    assert torch.equal(first, kept)
    assert torch.equal(first, second)


def test_under_activation_checkpointing(backend):
    arguments = batch()
    hidden = torch.randn(B, T, 8, requires_grad=True)
    weight = torch.randn(8, 129, requires_grad=True)
    rest = [arguments[name] for name in ("token_ids", "advantages", "mask")]

    def loss(x):
        return fastrl.logits_policy_loss(x @ weight, *rest, backend=backend).loss

    plain = torch.autograd.grad(loss(hidden), (hidden, weight))
    checkpoint(loss, hidden, use_reentrant=False).backward()
    assert torch.equal(hidden.grad, plain[0])
    assert torch.equal(weight.grad, plain[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(backend, mode):
    arguments = batch()
    logits, token_ids, advantages, mask, old, ref = arguments.values()
    logits.requires_grad_()
    with mode():
        result = fastrl.logits_policy_loss(
            logits,
            token_ids,
            advantages,
            mask,
            old_logprobs=old,
            ref_logprobs=ref,
            objective=KL,
            backend=backend,
        )
    loss, metrics, _ = run(arguments, backend, KL)
    assert not result.loss.requires_grad
    assert torch.equal(result.loss, loss)
    assert all(torch.equal(result.metrics[key], metrics[key]) for key in metrics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_bit_equal(backend, dtype):
    arguments = batch(50257, dtype)
    loss, metrics, grad = run(arguments, backend, KL)
    loss_, metrics_, grad_ = run(arguments, backend, KL)
    assert torch.equal(loss, loss_)
    assert torch.equal(grad, grad_)
    assert all(torch.equal(metrics[key], metrics_[key]) for key in metrics)


def test_micro_batches_with_one_normalizer_add_up(backend):
    lengths = torch.tensor([1, 3, 7, 50, 2, 9, 100, 11])
    mask = torch.arange(100) < lengths[:, None]
    logits, token_ids = torch.randn(8, 100, 5), torch.randint(5, (8, 100))
    advantages = torch.randn(8)
    for preset, count in (("dapo", mask.sum()), ("grpo", 8)):
        grads = []
        for size in (8, 4, 2, 1):
            x = logits.clone().requires_grad_()
            for i in range(0, 8, size):
                part = slice(i, i + size)
                fastrl.logits_policy_loss(
                    x[part],
                    token_ids[part],
                    advantages[part],
                    mask[part],
                    objective=preset,
                    normalizer=count,
                    backend=backend,
                ).loss.backward()
            grads.append(x.grad)
        for grad in grads[1:]:
            torch.testing.assert_close(grad, grads[0], rtol=1e-5, atol=1e-9)


def test_inputs_made_in_inference_mode_can_be_trained_on(backend):
    arguments = batch()
    expected = run(arguments, backend, KL)
    with torch.inference_mode():
        sampled = {k: v.clone() for k, v in arguments.items()}
    sampled["logits"] = arguments["logits"]
    loss, _, grad = run(sampled, backend, KL)
    assert torch.equal(loss, expected[0])
    assert torch.equal(grad, expected[2])


def test_the_second_derivative_is_refused(backend):
    arguments = batch()
    logits = arguments["logits"].requires_grad_()
    rest = [arguments[name] for name in ("token_ids", "advantages", "mask")]
    loss = fastrl.logits_policy_loss(logits, *rest, backend=backend).loss
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "a function"])
def test_a_broken_token_is_seen_in_loss_and_gradient_and_stays_in_its_sequence(backend, name):
    """Comparisons with NaN are false, so that a NaN token could look like a clipped one."""
    arguments = batch()
    arguments["mask"] = torch.ones(B, T)
    arguments["logits"][1, 2, 5] = math.nan
    loss, _, grad = run(arguments, backend, OBJECTIVES[name])
    assert torch.isnan(loss)
    assert torch.isnan(grad[1, 2]).all()
    assert torch.isfinite(grad[[0, 2]]).all()
