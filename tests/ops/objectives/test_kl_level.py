"""The ratio in a bias-corrected KL: with that of the token the gradient is unbiased."""

import itertools

import pytest
import torch

import fastrl
from fastrl import Objective

pytestmark = pytest.mark.kernels

VOCABULARY, TOKENS = 3, 2


def mean_gradient(backend, old, **fields):
    """The gradient by the logits, averaged over all sequences that the old policy samples."""
    ids = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=TOKENS)))
    dtype = torch.float64 if backend == "reference" else torch.float32
    z, ref, sampler = distributions(old)
    current, ref, sampled = (
        x.log_softmax(-1)[torch.arange(TOKENS), ids] for x in (z.requires_grad_(), ref, sampler)
    )
    logprobs = current.detach().to(dtype).requires_grad_()
    fields |= {"kl_coef": 1.0, "kl_gradient": "bias-corrected", "aggregation": "token-sum"}
    fastrl.policy_loss(
        logprobs,
        torch.zeros(len(ids), dtype=dtype),
        torch.ones(ids.shape),
        old_logprobs=sampled.to(dtype),
        ref_logprobs=ref.to(dtype),
        objective=Objective(**fields),
        backend=backend,
    ).loss.backward()
    current.backward(sampled.sum(1, keepdim=True).exp() * logprobs.grad.double())
    return z.grad


def distributions(old):
    """Logits of the policy, of the reference and of the old policy, `[T, V]`."""
    torch.manual_seed(0)
    z, ref, other = torch.randn(3, TOKENS, VOCABULARY, dtype=torch.float64)
    return z, ref, z + {"on policy": 0.0, "off policy": 0.3}[old] * other


def true_gradient(old):
    z, ref, _ = distributions(old)
    log_p = z.requires_grad_().log_softmax(-1)
    (log_p.exp() * (log_p - ref.log_softmax(-1))).sum().backward()
    return z.grad


@pytest.mark.parametrize("old", ["on policy", "off policy"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence-token"])
def test_with_the_ratio_of_the_token_the_gradient_is_unbiased(backend, level, old):
    wanted = true_gradient(old)
    torch.testing.assert_close(mean_gradient(backend, old, level=level), wanted, atol=1e-6, rtol=0)


def test_with_the_ratio_of_the_sequence_it_is_not(backend):
    """As in TRL: beside its own, a token gets a share of the other tokens' KL."""
    came = mean_gradient(backend, "on policy", level="sequence", kl_level="policy")
    assert (came - true_gradient("on policy")).norm() > 0.1 * true_gradient("on policy").norm()


@pytest.mark.parametrize("ref", [None, torch.nan])
@pytest.mark.parametrize("name", ["gspo", "luspo"])
def test_a_preset_with_it_and_without_a_weight_of_the_kl_is_that_of_the_paper(backend, name, ref):
    torch.manual_seed(0)
    old, grads = -torch.rand(2, 4) - 0.5, []
    new = old + 1e-4 * torch.randn(2, 4)
    coefficient = None if ref is None else 0.0
    for convention in ("trl", "fastrl"):
        objective = Objective.preset(name, convention=convention, kl_coef=coefficient)
        logprobs = new.clone().requires_grad_()
        fastrl.policy_loss(
            logprobs,
            torch.tensor([1.0, -2.0]),
            torch.ones(2, 4),
            old_logprobs=old,
            ref_logprobs=None if ref is None else torch.full_like(old, ref),
            objective=objective,
            backend=backend,
        ).loss.backward()
        grads.append(logprobs.grad)
    assert grads[0].abs().sum() > 0
    torch.testing.assert_close(*grads)


def test_a_level_without_effect_is_refused():
    kl = {"kl_coef": 0.1, "kl_gradient": "bias-corrected"}
    for fields in (kl, {**kl, "kl_gradient": "exact", "level": "sequence"}):
        with pytest.raises(ValueError, match="kl_level has no effect with kl_gradient"):
            Objective(kl_level="policy", **fields)
    with pytest.raises(ValueError, match="kl_level has no effect without kl_coef"):
        Objective(kl_level="policy", level="sequence")
    assert Objective.preset("grpo", convention="trl", kl_coef=0.1).kl_level == "policy"
