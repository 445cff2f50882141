"""Tensors made in inference mode (a rollout, a frozen head) as inputs of a training step."""

import pytest
import torch

import fastrl
from fastrl import Objective

with torch.inference_mode():
    GIVEN = {
        "mask": torch.tensor([[1, 1, 0], [0, 1, 1]]),
        "valid": torch.tensor([[True, True, False], [False, True, True]]),
        "ids": torch.randint(11, (2, 3)),
        "advantages": torch.tensor([1.0, -0.5]),
        "old": torch.full((2, 3), -2.0),
        "weight": torch.randn(11, 4),
        "hidden": torch.randn(2, 3, 4),
        "bias": torch.randn(11),
        "lora": (torch.randn(2, 4), torch.randn(11, 2), 0.5),
        "temperature": torch.rand(2, 3) + 0.5,
        "values": torch.randn(2, 3),
        "values6": torch.randn(6),
        "mask6": torch.tensor([1, 1, 0, 0, 1, 1]),
        "bounds": torch.tensor([0, 2, 6], dtype=torch.int32),
    }
BOTH = Objective(kl_coef=0.1, entropy_coef=0.1)
HEAD = {"bias": "bias", "lora": "lora", "temperature": "temperature"}
#: A function, the shape of the trained tensor x, and the arguments by their names in GIVEN.
CALLS = {
    "value_loss": (fastrl.value_loss, (2, 3), "x values valid", {"old_values": "old", "clip": 0.2}),
    "value_loss, packed": (
        fastrl.value_loss,
        (6,),
        "x values6 mask6",
        {"aggregation": "seq-mean-token-mean", "cu_seqlens": "bounds"},
    ),
    "masked_mean": (fastrl.masked_mean, (2, 3), "x mask", {}),
    "kl_divergence": (fastrl.kl_divergence, (2, 3), "x old", {}),
    "policy_loss": (
        fastrl.policy_loss,
        (2, 3),
        "x advantages mask",
        {"old_logprobs": "old", "ref_logprobs": "old", "entropy": "values", "objective": BOTH},
    ),
    "frozen head, scored": (
        fastrl.linear_token_logprobs,
        (2, 3, 4),
        "x weight ids",
        {"mask": "mask", **HEAD},
    ),
    "frozen head, loss": (
        fastrl.linear_policy_loss,
        (2, 3, 4),
        "x weight ids advantages valid",
        {"ref_logprobs": "old", "objective": BOTH, **HEAD},
    ),
    "frozen backbone, scored": (
        fastrl.linear_token_logprobs,
        (11, 4),
        "hidden x ids",
        {"mask": "valid"},
    ),
    "frozen backbone, loss": (
        fastrl.linear_policy_loss,
        (11, 4),
        "hidden x ids advantages mask",
        {"objective": "gspo"},
    ),
}
PLAIN = (fastrl.value_loss, fastrl.masked_mean, fastrl.kl_divergence)  # no backends


@pytest.mark.parametrize("name", CALLS)
def test_they_are_constants_like_any_others(backend, name):
    function, shape, names, options = CALLS[name]
    x = torch.randn(shape)
    cloned = {key: value if type(value) is tuple else value.clone() for key, value in GIVEN.items()}
    cloned["lora"] = (*(part.clone() for part in GIVEN["lora"][:2]), 0.5)
    outcomes = []
    for given in (GIVEN, cloned):
        leaf = x.clone().requires_grad_()
        arguments = [{**given, "x": leaf}[key] for key in names.split()]
        named = {
            key: given.get(value, value) if type(value) is str else value
            for key, value in options.items()
        }
        result = function(
            *arguments, **named, **({} if function in PLAIN else {"backend": backend})
        )
        total = getattr(result, "loss", result).sum()
        total.backward()
        outcomes.append((total.detach(), leaf.grad))
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
    for make in (torch.ones, torch.inference_mode()(torch.ones)):
        logprobs = fastrl.linear_token_logprobs(
            hidden, weight, ids, compact=compact, backend=backend
        )
        grads.append(torch.autograd.grad(logprobs, hidden, make(3))[0])
    assert torch.equal(*grads)


def test_a_frozen_head_is_kept_and_not_copied():
    with torch.inference_mode():
        weight = torch.randn(11, 4)
    hidden = torch.randn(3, 4, requires_grad=True)
    node = fastrl.linear_token_logprobs(hidden, weight, torch.tensor([1, 2, 3])).grad_fn
    while not hasattr(node, "inference_tensors"):
        node = node.next_functions[0][0]
    (kept,) = (x for x in node.inference_tensors if x is not None)
    assert kept.data_ptr() == weight.data_ptr()
