"""Tensors made in inference mode (a rollout, a frozen head) as inputs of a training step."""

import pytest
import torch

import fastrl
from fastrl import Objective

with torch.inference_mode():
    MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])
    GIVEN = {
        "ids": torch.randint(11, (2, 3)),
        "advantages": torch.tensor([1.0, -0.5]),
        "old": torch.full((2, 3), -2.0),
        "weight": torch.randn(11, 4),
        "hidden": torch.randn(2, 3, 4),
        "bias": torch.randn(11),
        "a": torch.randn(2, 4),
        "b": torch.randn(11, 2),
        "temperature": torch.rand(2, 3) + 0.5,
        "values": torch.randn(2, 3),
        "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32),
    }

BOTH = Objective(kl_coef=0.1, entropy_coef=0.1)


def linear_options(given, mask):
    lora = (given["a"], given["b"], 0.5)
    return {"bias": given["bias"], "lora": lora, "temperature": given["temperature"]}


#: the shape of the trained tensor, and the call
CALLS = {
    "value_loss": (
        (2, 3),
        lambda x, g, m, _: fastrl.value_loss(x, g["values"], m, old_values=g["old"], clip=0.2).loss,
    ),
    "value_loss, packed": (
        (6,),
        lambda x, g, m, _: (
            fastrl.value_loss(
                x,
                g["values"].view(-1),
                m.view(-1),
                aggregation="seq-mean-token-mean",
                cu_seqlens=g["cu_seqlens"],
            ).loss
        ),
    ),
    "masked_mean": ((2, 3), lambda x, g, m, _: fastrl.masked_mean(x, m)),
    "kl_divergence": ((2, 3), lambda x, g, m, _: fastrl.kl_divergence(x, g["old"]).sum()),
    "policy_loss": (
        (2, 3),
        lambda x, g, m, backend: (
            fastrl.policy_loss(
                x,
                g["advantages"],
                m,
                old_logprobs=g["old"],
                ref_logprobs=g["old"],
                entropy=g["values"],
                objective=BOTH,
                backend=backend,
            ).loss
        ),
    ),
    "frozen head, scored": (
        (2, 3, 4),
        lambda x, g, m, backend: fastrl.linear_token_logprobs(
            x, g["weight"], g["ids"], mask=m, **linear_options(g, m), backend=backend
        ).sum(),
    ),
    "frozen head, loss": (
        (2, 3, 4),
        lambda x, g, m, backend: (
            fastrl.linear_policy_loss(
                x,
                g["weight"],
                g["ids"],
                g["advantages"],
                m,
                ref_logprobs=g["old"],
                objective=BOTH,
                **linear_options(g, m),
                backend=backend,
            ).loss
        ),
    ),
    "frozen backbone, scored": (
        (11, 4),
        lambda x, g, m, backend: fastrl.linear_token_logprobs(
            g["hidden"], x, g["ids"], mask=m, backend=backend
        ).sum(),
    ),
    "frozen backbone, loss": (
        (11, 4),
        lambda x, g, m, backend: (
            fastrl.linear_policy_loss(
                g["hidden"], x, g["ids"], g["advantages"], m, objective="gspo", backend=backend
            ).loss
        ),
    ),
}


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("name", CALLS)
def test_they_are_constants_like_any_others(backend, name, mask_dtype):
    shape, call = CALLS[name]
    x = torch.randn(shape)
    with torch.inference_mode():
        mask = MASK.to(mask_dtype)
    assert mask.is_inference()
    plain = {key: value.clone() for key, value in GIVEN.items()}
    outcomes = []
    for given, valid in ((GIVEN, mask), (plain, mask.clone())):
        leaf = x.clone().requires_grad_()
        result = call(leaf, given, valid, backend)
        result.backward()
        outcomes.append((result.detach(), leaf.grad))
    for found, wanted in zip(*outcomes, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("objective", ["ppo", "gspo", lambda logprobs, old, ref, a: -a * logprobs])
def test_the_metrics_of_an_evaluation_are_those_of_training(backend, objective):
    """The share of tokens without gradient, too, though nothing is differentiated there."""
    logprobs, advantages, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1), torch.ones(1, 2)
    options = {"objective": objective, "backend": "auto" if callable(objective) else backend}
    trained = fastrl.policy_loss(logprobs, advantages, mask, **options).metrics
    with torch.inference_mode():
        of_inference = [x.clone() for x in (logprobs, advantages, mask)]
        for given in ((logprobs, advantages, mask), of_inference):
            assert fastrl.policy_loss(*given, **options).metrics == trained


@pytest.mark.parametrize("compact", [True, False])
def test_an_upstream_gradient(backend, compact):
    hidden = torch.randn(3, 4, requires_grad=True)
    weight, ids = torch.randn(11, 4), torch.tensor([1, 2, 3])
    grads = []
    for make in (torch.ones, lambda size: torch.inference_mode()(torch.ones)(size)):
        upstream = make(3)
        logprobs = fastrl.linear_token_logprobs(
            hidden, weight, ids, compact=compact, backend=backend
        )
        grads.append(torch.autograd.grad(logprobs, hidden, upstream)[0])
    assert upstream.is_inference()
    assert torch.equal(*grads)


def test_a_frozen_head_is_kept_and_not_copied():
    with torch.inference_mode():
        weight = torch.randn(11, 4)
    hidden = torch.randn(3, 4, requires_grad=True)
    logprobs = fastrl.linear_token_logprobs(hidden, weight, torch.tensor([1, 2, 3]))
    node = logprobs.grad_fn
    while not hasattr(node, "inference_tensors"):
        node = node.next_functions[0][0]
    (kept,) = (x for x in node.inference_tensors if x is not None)
    assert kept.data_ptr() == weight.data_ptr()
