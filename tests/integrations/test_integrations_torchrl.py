"""torchrl's functional GAE on fastrl: results and gradients equal a loop's and torchrl's."""

import importlib
import importlib.util
import inspect
import sys
import types

import pytest
import torch

from fastrl.integrations import torchrl as ours
from tests.support.importable import importable, without_modules

HOME = "torchrl.objectives.value.functional"
NAMES = ("generalized_advantage_estimate", "vec_generalized_advantage_estimate")


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


def implementations():
    yield "transcribed", dict.fromkeys(NAMES, transcribed)
    module = importable(HOME)
    if module:
        yield "installed", {name: getattr(module, name) for name in NAMES}


@pytest.fixture(params=implementations(), ids=lambda found: found[0])
def theirs(request):
    return request.param[1]


@pytest.fixture
def package(monkeypatch):
    """A package with torchrl's modules, made of the loop."""
    without_modules(monkeypatch, "torchrl")
    path = HOME.split(".")
    for depth in range(1, len(path) + 1):
        name = ".".join(path[:depth])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in NAMES:
        copy = types.FunctionType(transcribed.__code__, globals(), name, (None,))
        copy.__kwdefaults__, copy.__module__ = {"time_dim": -2}, HOME
        setattr(sys.modules[HOME], name, copy)
    return sys.modules[HOME]


def inputs(shape, dtype=torch.float32):
    torch.manual_seed(0)
    done = torch.rand(shape) < 0.2
    terminated = done & (torch.rand(shape) < 0.5)  # the rest are truncated
    values = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    return values, done, terminated


def results(function, values, *arguments, **options):
    values = [x.clone().requires_grad_() for x in values]
    advantage, target = function(0.97, 0.9, *values, *arguments, **options)
    weights = torch.linspace(-1, 2, advantage.numel()).reshape(advantage.shape)
    (advantage * weights + target * weights.flip(0)).sum().backward()
    return advantage.detach(), target.detach(), *(x.grad for x in values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "time_dim"),
    [((9, 1), -2), ((4, 9, 1), -2), ((2, 3, 9, 2), -2), ((4, 9), -1), ((9, 4, 2), 0), ((1, 1), -2)],
)
@pytest.mark.parametrize("truncation", [True, False])
def test_equals_torchrl(theirs, name, shape, time_dim, truncation):
    values, done, terminated = inputs(shape)
    arguments = (done, terminated) if truncation else (done,)
    options = {} if time_dim == -2 else {"time_dim": time_dim}
    a = results(getattr(ours, name), values, *arguments, **options)
    b = results(theirs[name], values, *arguments, **options)
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    values, done, _ = inputs((3, 5, 1), dtype)
    advantage, target = ours.generalized_advantage_estimate(0.97, 0.9, *values, done)
    assert advantage.dtype == target.dtype == dtype
    expected, _ = transcribed(0.97, 0.9, *values, done)
    rtol = 1e-9 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(advantage.double(), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("gamma", "lmbda"),
    [
        (torch.tensor(0.9), torch.tensor([0.8])),
        (torch.tensor(0.9, dtype=torch.float64), torch.full((1, 1, 1), 0.8)),
        (0.9, torch.tensor(0.8)),
    ],
)
def test_gamma_and_lambda_may_be_scalar_tensors(name, gamma, lmbda):
    values, done, _ = inputs((3, 5, 1))
    a = getattr(ours, name)(gamma, lmbda, *values, done)
    b = getattr(ours, name)(0.9, 0.8, *values, done)
    torch.testing.assert_close(a[0], b[0])
    with torch.no_grad():  # so the gradient is not needed
        lmbda = lmbda.clone().requires_grad_()
        assert torch.equal(getattr(ours, name)(gamma, lmbda, *values, done)[0], a[0])


def per_step_or_learned(case, shape):
    """Return gamma and lmbda, one of them per step or learned."""
    gamma, lmbda = torch.full(shape, 0.9), torch.tensor(0.8)
    gamma[..., 2, :] = 0.81
    return (gamma, lmbda) if case == "per step" else (torch.tensor(0.9), lmbda.requires_grad_())


MORE = pytest.mark.parametrize("case", ["per step", "learned"])


@MORE
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("time_dim", [-2, 1])
def test_per_step_or_learned_goes_to_torchrls_function(package, name, case, time_dim):
    values, done, terminated = inputs((3, 5, 2))
    arguments = (*per_step_or_learned(case, (3, 5, 2)), *values, done, terminated)
    expected = getattr(package, name)(*arguments, time_dim=time_dim)
    with ours.use_fastrl():
        found = getattr(package, name)(*arguments, time_dim=time_dim)
        assert getattr(package, name) is getattr(ours, name)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad == (case == "learned")
    with pytest.raises(NotImplementedError, match="while `use_fastrl` is in use"):
        getattr(ours, name)(*arguments)


@MORE
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(importable(HOME) is None, reason="needs torchrl itself")
def test_the_installed_torchrl_takes_per_step_or_learned(name, case):
    home = importlib.import_module(HOME)
    values, done, terminated = inputs((3, 5, 1))
    arguments = (*per_step_or_learned(case, (3, 5, 1)), *values, done, terminated)
    expected = getattr(home, name)(*arguments)
    with ours.use_fastrl():
        found = getattr(home, name)(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


REFUSED = {
    "several gammas": (
        NotImplementedError,
        r"gamma must be a number or a tensor .*got shape \(5, 1\); torchrl's function",
    ),
    "learned lambda": (NotImplementedError, "lmbda must be .*got one that requires a gradient"),
    "gamma above 1": (ValueError, r"gamma must be in \[0, 1\], got 1.5"),
    "shape": (ValueError, r"reward must have shape \(5, 1\) like state_value, got \(5, 2\)"),
    "time": (ValueError, "time_dim must be a dimension .*got 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_arguments_are_refused_by_name(case):
    values, done, _ = inputs((5, 1))
    gamma = {"several gammas": torch.full((5, 1), 0.9), "gamma above 1": 1.5}.get(case, 0.9)
    lmbda = torch.tensor(0.9, requires_grad=case == "learned lambda")
    if case == "shape":
        values[2] = torch.randn(5, 2)
    error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        ours.generalized_advantage_estimate(
            gamma, lmbda, *values, done, time_dim=2 if case == "time" else -2
        )


def test_a_second_derivative_is_refused():
    values, done, _ = inputs((5, 1))
    reward = values[2].requires_grad_()
    advantage, _ = ours.generalized_advantage_estimate(0.9, 0.9, values[0], values[1], reward, done)
    (grad,) = torch.autograd.grad(advantage.square().sum(), reward, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_functions_are_replaced_and_restored(package):
    own = package.generalized_advantage_estimate
    with ours.use_fastrl() as replaced:
        assert replaced.names == tuple(f"{HOME}.{name}" for name in NAMES)
        assert package.generalized_advantage_estimate is ours.generalized_advantage_estimate
    assert package.generalized_advantage_estimate is own


@pytest.mark.skipif(importable(HOME) is None, reason="needs torchrl itself")
@pytest.mark.parametrize("skipping", [False, True])
def test_the_installed_estimator_runs_on_fastrl(skipping):
    advantages = importlib.import_module("torchrl.objectives.value.advantages")
    nn, TensorDict = (
        importlib.import_module("tensordict.nn"),
        importlib.import_module("tensordict").TensorDict,
    )
    torch.manual_seed(0)
    network = nn.TensorDictModule(torch.nn.Linear(3, 1), ["obs"], ["state_value"])
    estimator = advantages.GAE(gamma=0.97, lmbda=0.9, value_network=network)
    done = torch.rand(4, 6, 1) < 0.2
    following = {"obs": torch.randn(4, 6, 3), "reward": torch.randn(4, 6, 1), "done": done}
    following["terminated"] = done & (torch.rand(4, 6, 1) < 0.5)
    data = TensorDict({"obs": torch.randn(4, 6, 3), "next": following}, batch_size=[4, 6])
    if skipping:  # gamma is then a tensor with a power per step
        data["steps_to_next_obs"] = torch.randint(1, 4, (4, 6, 1))
    expected = estimator(data.clone())["advantage"]
    with ours.use_fastrl():
        assert advantages.vec_generalized_advantage_estimate is (
            ours.vec_generalized_advantage_estimate
        )
        found = estimator(data.clone())["advantage"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert inspect.getmodule(advantages.vec_generalized_advantage_estimate).__name__ == HOME
