"""The one-pass loss from logits: the same numbers as its parts, its gradient against float64."""

from dataclasses import replace

import pytest
import torch

import fastrl
from fastrl import Objective
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


def test_ignored_ids_count_as_masked(backend):
    arguments = batch()
    ignored = {**arguments, "mask": torch.ones(B, T), "token_ids": arguments["token_ids"].clone()}
    ignored["token_ids"][arguments["mask"] == 0] = -100
    loss, metrics, grad = run(arguments, backend, KL)
    loss_, metrics_, grad_ = run(ignored, backend, KL)
    assert torch.equal(loss, loss_)
    assert torch.equal(grad, grad_)
    assert torch.equal(metrics["active_tokens"], metrics_["active_tokens"])


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
