"""The policy loss and autograd: modes, upstream gradients, kept graphs, checkpointing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastrl
from fastrl import Objective
from fastrl.objective.presets import PRESETS
from tests.ops.inputs import make_logprobs, policy_inputs
from tests.ops.policy_loss_cases import needed, run

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FULL = Objective(kl_coef=0.1, entropy_coef=0.05)


def loss_of(backend, inputs, logprobs, entropy, objective=FULL):
    return fastrl.policy_loss(
        logprobs,
        inputs["advantages"],
        inputs["mask"],
        old_logprobs=inputs["old_logprobs"],
        ref_logprobs=inputs["ref_logprobs"],
        entropy=entropy,
        objective=objective,
        backend=backend,
    ).loss


@pytest.fixture
def inputs():
    return policy_inputs(3, 5, torch.float32, "random")


@pytest.fixture
def gradients(backend, inputs):
    """Gradients to logprobs and entropy at upstream gradient 1."""
    return run(backend, FULL, inputs, needed(FULL))[1:]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_the_loss_is_the_same(backend, inputs, mode):
    expected, _, _ = run(backend, FULL, inputs, needed(FULL))
    for requires_grad in (False, True):
        logprobs = inputs["logprobs"].clone().requires_grad_(requires_grad)
        with mode():
            loss = loss_of(backend, inputs, logprobs, inputs["entropy"])
        assert not loss.requires_grad
        assert torch.equal(loss, expected.loss)


def test_inputs_made_in_inference_mode_can_be_trained_on(backend, inputs, gradients):
    with torch.inference_mode():
        sampled = {name: value.clone() for name, value in inputs.items()}
    logprobs = inputs["logprobs"].clone().requires_grad_()
    loss_of(backend, sampled, logprobs, inputs["entropy"]).backward()
    assert torch.equal(logprobs.grad, gradients[0])


@pytest.mark.parametrize("logprobs_grad", [False, True])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_gradients_only_where_asked(backend, inputs, gradients, logprobs_grad, entropy_grad):
    logprobs = inputs["logprobs"].clone().requires_grad_(logprobs_grad)
    entropy = inputs["entropy"].clone().requires_grad_(entropy_grad)
    loss = loss_of(backend, inputs, logprobs, entropy)
    assert loss.requires_grad == (logprobs_grad or entropy_grad)
    if loss.requires_grad:
        loss.backward()
    for x, expected in ((logprobs, gradients[0]), (entropy, gradients[1])):
        assert torch.equal(x.grad, expected) if x.requires_grad else x.grad is None


def test_constants_get_no_gradient(backend):
    inputs = policy_inputs(3, 5, torch.float32)
    constants = ("old_logprobs", "ref_logprobs", "advantages")
    for name in constants:
        inputs[name].requires_grad_()
    run(backend, Objective(kl_coef=0.1), inputs, ("old_logprobs", "ref_logprobs"))
    assert all(inputs[name].grad is None for name in constants)


def upstream(kind, loss):
    """The loss, followed by an op that returns a particular upstream gradient."""
    if kind == "zero":
        return loss * 0.0
    if kind == "scaled":
        return loss * -2.5
    if kind == "expanded":  # a gradient of stride 0
        return loss.expand(4, 3).sum()
    return torch.stack([loss, loss])[::2].sum()  # a view of a longer gradient


@pytest.mark.parametrize(
    ("kind", "factor"), [("zero", 0.0), ("scaled", -2.5), ("expanded", 12.0), ("strided", 1.0)]
)
def test_upstream_gradients(backend, inputs, gradients, kind, factor):
    logprobs = inputs["logprobs"].clone().requires_grad_()
    entropy = inputs["entropy"].clone().requires_grad_()
    upstream(kind, loss_of(backend, inputs, logprobs, entropy)).backward()
    torch.testing.assert_close(logprobs.grad, factor * gradients[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy.grad, factor * gradients[1], rtol=1e-6, atol=0)


def test_a_masked_token_gets_zero_whatever_comes_from_upstream(backend, inputs):
    logprobs = inputs["logprobs"].masked_fill(~inputs["mask"], float("nan")).requires_grad_()
    (loss_of(backend, inputs, logprobs, inputs["entropy"]) * 1e30).backward()
    assert (logprobs.grad[~inputs["mask"]] == 0).all()


@pytest.mark.parametrize("factor", [1.0, -2.0])
def test_a_kept_graph_gives_the_same_gradient_again(backend, inputs, gradients, factor):
    logprobs = inputs["logprobs"].clone().requires_grad_()
    loss = loss_of(backend, inputs, logprobs, inputs["entropy"]) * factor
    for _ in range(3):
        (gradient,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
        assert torch.equal(gradient, factor * gradients[0])


def test_two_losses_on_the_same_logprobs_add_up(backend, inputs, gradients):
    logprobs = inputs["logprobs"].clone().requires_grad_()
    losses = [loss_of(backend, inputs, logprobs, inputs["entropy"]) for _ in range(2)]
    sum(losses).backward()
    torch.testing.assert_close(logprobs.grad, 2 * gradients[0], rtol=1e-6, atol=0)


def test_gradients_accumulate_in_the_leaf(backend, inputs, gradients):
    logprobs = inputs["logprobs"].clone().requires_grad_()
    for _ in range(2):
        loss_of(backend, inputs, logprobs, inputs["entropy"]).backward()
    torch.testing.assert_close(logprobs.grad, 2 * gradients[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_second_derivative_is_refused(backend, inputs, preset):
    logprobs = inputs["logprobs"].clone().requires_grad_()
    objective = Objective.preset(preset)
    loss = loss_of(backend, inputs, logprobs, None, objective)

    def second_derivative():
        (gradient,) = torch.autograd.grad(loss * loss, logprobs, create_graph=True)
        return torch.autograd.grad(gradient.sum(), logprobs)

    with pytest.raises(RuntimeError, match="first derivatives only"):
        second_derivative()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(backend, inputs, use_reentrant):
    weight = torch.randn(5, 5, requires_grad=True)

    def loss(hidden):
        logprobs = -(hidden @ weight).square()
        return loss_of(backend, inputs, logprobs, None, Objective(kl_coef=0.1))

    hidden = torch.randn(3, 5, requires_grad=True)
    expected = torch.autograd.grad(loss(hidden), (hidden, weight))
    checkpoint(loss, hidden, use_reentrant=use_reentrant).backward()
    assert torch.equal(hidden.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_logprobs_of_a_graph_get_their_gradient(backend):
    # a mask on the last token alone must still train: not a loss that looks right with gradient 0
    weight = torch.randn(8, 8, requires_grad=True)
    hidden = torch.randn(2, 100, 8)
    mask = torch.zeros(2, 100)
    mask[:, -1] = 1
    logprobs = torch.log_softmax(hidden @ weight, -1)[..., 0]
    fastrl.policy_loss(logprobs, torch.tensor([1.0, 2.0]), mask, backend=backend).loss.backward()
    expected = torch.autograd.grad(
        -(torch.log_softmax(hidden[:, -1] @ weight, -1)[:, 0] * torch.tensor([0.5, 1.0])).sum(),
        weight,
    )[0]
    torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-7)


GRADCHECK = [
    Objective(clip_low=0.9, clip_high=5.0, kl_coef=0.2),
    Objective(level="sequence", clip_low=0.9, clip_high=5.0),
    Objective(surrogate="sapo", kl_coef=0.1, kl_estimator="k2"),
    Objective(surrogate="sapo", level="sequence", entropy_coef=0.3),
    Objective(surrogate="gmpo", level="sequence", clip_low=0.3, clip_high=0.3),
    Objective(surrogate="reinforce", entropy_coef=0.3, kl_coef=0.1, kl_estimator="k1"),
    Objective(surrogate=lambda new, old, ref, advantages: torch.sin(new - old) * advantages),
]


@pytest.mark.parametrize("objective", GRADCHECK, ids=lambda o: f"{o.surrogate}-{o.level}"[:20])
def test_gradcheck_of_the_reference(objective):
    inputs = policy_inputs(3, 4, torch.float64, "random")
    logprobs = make_logprobs(3, 4).requires_grad_()
    inputs["old_logprobs"] = logprobs.detach() + 0.2 * torch.randn(3, 4)
    entropy = None
    if objective.entropy_coef:
        entropy = inputs["entropy"].requires_grad_()
    variables = [logprobs] if entropy is None else [logprobs, entropy]

    def loss(current, bonus=None):
        return loss_of("reference", inputs, current, bonus, objective)

    assert torch.autograd.gradcheck(loss, variables)


def test_an_objective_that_overwrites_what_its_gradient_needs_is_refused(backend):
    def overwrites(logprobs, old, ref, advantages):
        ratio = (logprobs - old).exp()
        loss = ratio * advantages
        ratio.mul_(2)
        return loss

    logprobs = torch.randn(2, 3, requires_grad=True)
    arguments = (torch.ones(2), torch.ones(2, 3))
    options = {"old_logprobs": torch.zeros(2, 3), "objective": Objective(surrogate=overwrites)}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fastrl.policy_loss(logprobs, *arguments, **options)
