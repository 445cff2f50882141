"""torchrl's functional GAE on fastrl: results and gradients equal a loop's and torchrl's."""

import importlib

import pytest
import torch

from fastrl.integrations import torchrl as ours
from tests.integrations.compared import close, each, outcome
from tests.integrations.packages import importable, stand_ins

HOME = "torchrl.objectives.value.functional"
NAMES = ("generalized_advantage_estimate", "vec_generalized_advantage_estimate")
NAME = pytest.mark.parametrize("name", NAMES)


def transcribed(
    gamma, lmbda, state_value, next_state_value, reward, done, terminated=None, *, time_dim=-2
):
    """What torchrl 0.14 documents, one step at a time in float64."""
    terminated = done if terminated is None else terminated
    gamma, lmbda = (
        torch.as_tensor(x, dtype=torch.float64).expand(reward.shape) for x in (gamma, lmbda)
    )
    tensors = (state_value, next_state_value, reward, done, terminated, gamma, lmbda)
    V, after, r, done, terminated, gamma, lmbda = (x.movedim(time_dim, 0) for x in tensors)
    trace, found = 0.0, []
    for t in reversed(range(len(r))):
        delta = r[t].double() + gamma[t] * after[t].double() * ~terminated[t] - V[t].double()
        trace = delta + gamma[t] * lmbda[t] * trace * ~done[t]
        found.append(trace)
    advantage = torch.stack(found[::-1]).movedim(0, time_dim)
    return advantage, advantage + state_value


IMPLEMENTATIONS = {"transcribed": dict.fromkeys(NAMES, transcribed)}
if importable(HOME):
    IMPLEMENTATIONS["installed"] = {name: getattr(importable(HOME), name) for name in NAMES}
theirs = each(IMPLEMENTATIONS)


@pytest.fixture(params=IMPLEMENTATIONS)
def home(request, monkeypatch):
    """torchrl's module: made of the loop, and the installed one."""
    if request.param == "transcribed":
        stand_ins(monkeypatch, {HOME: IMPLEMENTATIONS[request.param]})
    return importlib.import_module(HOME)


def inputs(shape, dtype=torch.float32):
    torch.manual_seed(0)
    done = torch.rand(shape) < 0.2
    terminated = done & (torch.rand(shape) < 0.5)  # the rest are truncated
    values = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    return values, done, terminated


def results(function, values, *arguments, **options):
    def run(*values):
        advantage, target = function(0.97, 0.9, *values, *arguments, **options)
        weights = torch.linspace(-1, 2, advantage.numel()).reshape(advantage.shape)
        return advantage * weights + target * weights.flip(0), advantage, target

    return outcome(run, *values)


@pytest.mark.parametrize("truncation", [True, False])
@pytest.mark.parametrize(
    ("shape", "time_dim"),
    [((9, 1), -2), ((4, 9, 1), -2), ((2, 3, 9, 2), -2), ((4, 9), -1), ((9, 4, 2), 0), ((1, 1), -2)],
)
@NAME
def test_equals_torchrl(theirs, name, shape, time_dim, truncation):
    values, done, terminated = inputs(shape)
    arguments = (done, terminated) if truncation else (done,)
    options = {} if time_dim == -2 else {"time_dim": time_dim}
    a, b = (
        results(function, values, *arguments, **options)
        for function in (getattr(ours, name), theirs[name])
    )
    close(a, b)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.bfloat16, 3e-2)])
def test_dtypes(dtype, bound):
    values, done, _ = inputs((3, 5, 1), dtype)
    advantage, target = ours.generalized_advantage_estimate(0.97, 0.9, *values, done)
    assert advantage.dtype == target.dtype == dtype
    expected, _ = transcribed(0.97, 0.9, *values, done)
    torch.testing.assert_close(advantage.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("gamma", "lmbda"),
    [
        (torch.tensor(0.9), torch.tensor([0.8])),
        (torch.tensor(0.9, dtype=torch.float64), torch.full((1, 1, 1), 0.8)),
        (0.9, torch.tensor(0.8)),
    ],
)
@NAME
def test_gamma_and_lambda_may_be_scalar_tensors(name, gamma, lmbda):
    (values, done, _), function = inputs((3, 5, 1)), getattr(ours, name)
    found, expected = function(gamma, lmbda, *values, done), function(0.9, 0.8, *values, done)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():  # so the gradient is not needed
        learned = lmbda.clone().requires_grad_()
        assert torch.equal(function(gamma, learned, *values, done)[0], found[0])


@pytest.mark.parametrize("case", ["per step", "learned"])
@pytest.mark.parametrize("time_dim", [-2, 1])
@NAME
def test_per_step_or_learned_goes_to_torchrls_function(home, name, case, time_dim):
    values, done, terminated = inputs((3, 5, 2))
    gamma, lmbda = torch.tensor(0.9), torch.tensor(0.8, requires_grad=case == "learned")
    if case == "per step":
        gamma = gamma.repeat(3, 5, 2)
        gamma[..., 2, :] = 0.81
    arguments = (gamma, lmbda, *values, done, terminated)
    expected = getattr(home, name)(*arguments, time_dim=time_dim)
    with ours.use_fastrl():
        assert getattr(home, name) is getattr(ours, name)
        found = getattr(home, name)(*arguments, time_dim=time_dim)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad == b.requires_grad
    with pytest.raises(NotImplementedError, match="while `use_fastrl` is in use"):
        getattr(ours, name)(*arguments)


def test_a_second_derivative_is_refused():
    (value, after, reward), done, _ = inputs((5, 1))
    reward.requires_grad_()
    advantage, _ = ours.generalized_advantage_estimate(0.9, 0.9, value, after, reward, done)
    (grad,) = torch.autograd.grad(advantage.square().sum(), reward, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_functions_are_replaced_and_restored(home):
    own = [getattr(home, name) for name in NAMES]
    with ours.use_fastrl() as replaced:
        assert replaced.names == tuple(f"{HOME}.{name}" for name in NAMES)
        assert [getattr(home, name) for name in NAMES] == [getattr(ours, name) for name in NAMES]
    assert [getattr(home, name) for name in NAMES] == own


@pytest.mark.skipif(importable(HOME) is None, reason="needs torchrl itself")
@pytest.mark.parametrize("skipping", [False, True])
def test_the_installed_estimator_runs_on_fastrl(skipping):
    advantages = importlib.import_module("torchrl.objectives.value.advantages")
    nn = importlib.import_module("tensordict.nn")
    torch.manual_seed(0)
    network = nn.TensorDictModule(torch.nn.Linear(3, 1), ["obs"], ["state_value"])
    estimator = advantages.GAE(gamma=0.97, lmbda=0.9, value_network=network)
    done = torch.rand(4, 6, 1) < 0.2
    following = {"obs": torch.randn(4, 6, 3), "reward": torch.randn(4, 6, 1), "done": done}
    following["terminated"] = done & (torch.rand(4, 6, 1) < 0.5)
    data = {"obs": torch.randn(4, 6, 3), "next": following}
    data = importlib.import_module("tensordict").TensorDict(data, batch_size=[4, 6])
    if skipping:  # gamma is then a tensor with a power per step
        data["steps_to_next_obs"] = torch.randint(1, 4, (4, 6, 1))
    expected = estimator(data.clone())["advantage"]
    with ours.use_fastrl():
        assert vars(advantages)[NAMES[1]] is getattr(ours, NAMES[1])
        found = estimator(data.clone())["advantage"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert vars(advantages)[NAMES[1]].__module__ == HOME
