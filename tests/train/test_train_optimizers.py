"""Optimizers lose no small updates of bfloat16 weights and resume to the bit; rates, clipping."""

import io
import sys

import pytest
import torch

pytest.importorskip("transformers")

import fastrl.train
from fastrl.train.config import GrpoConfig
from fastrl.train.optimizers import MasterWeights, apply, learning_rate, make_optimizer

KINDS = {
    "float32": {},
    "masters": {"weights": "bfloat16"},
    "stochastic": {"weights": "bfloat16", "rounding": "stochastic"},
    "eight_bit": {"optimizer": "adamw_8bit"},
    "eight_bit_masters": {"weights": "bfloat16", "optimizer": "adamw_8bit"},
    "offloaded": {"weights": "bfloat16"},
}
KINDS["eight_bit_stochastic"] = KINDS["stochastic"] | KINDS["eight_bit"]


def make(kind, **changes):
    """Parameters, their optimizer and configuration; the last is float32, as a value head is."""
    if "eight_bit" in kind or "stochastic" in kind:
        pytest.importorskip("torchao")
    common = {"learning_rate": 0.1, "warmup_steps": 0, "schedule": "constant", "max_grad_norm": 1e9}
    config = GrpoConfig(**{**common, **KINDS[kind], **changes})
    torch.manual_seed(0)
    weights = [
        torch.randn(shape).to(getattr(torch, config.weights)) for shape in ((64, 128), (128,))
    ]
    parameters = [torch.nn.Parameter(weight) for weight in (*weights, torch.randn(7))]
    if kind != "offloaded":
        return parameters, make_optimizer(parameters, config), config
    options = {"device": torch.device("cpu"), "options": {"lr": 0.1}}  # refused, hence by hand
    adamw = lambda copies: torch.optim.AdamW(copies, fused=True, weight_decay=0.0)  # noqa: E731
    return parameters, MasterWeights(parameters, adamw, **options), config


def steps(parameters, optimizer, config, count, gradient=torch.randn_like, first=0):
    for step in range(first, first + count):
        for parameter in parameters:
            parameter.grad = gradient(parameter)
        apply(optimizer, config, step)


@pytest.mark.parametrize("kind", ["masters", "offloaded"])
def test_master_copies_are_those_of_adamw_in_float64(kind):
    """Each weight is its copy, rounded; also if it changed before the first step."""
    parameters, optimizer, config = make(kind, learning_rate=1e-4, schedule="linear", steps=60)
    parameters[1].data.fill_(5.0)
    exact = [torch.nn.Parameter(parameter.detach().double()) for parameter in parameters]
    begun = [parameter.detach().clone() for parameter in exact]
    adamw = torch.optim.AdamW(exact, weight_decay=0.0)
    for step in range(60):
        for parameter, other in zip(parameters, exact, strict=True):
            parameter.grad = (1 + torch.randn(parameter.shape)).to(parameter.dtype)
            other.grad = parameter.grad.double()
        apply(optimizer, config, step)
        adamw.param_groups[0]["lr"] = learning_rate(config, step)
        adamw.step()
    *masters, own = optimizer.state_dict()["masters"]
    assert own is None
    masters.append(parameters[2].detach())
    for parameter, master, other, start in zip(parameters, masters, exact, begun, strict=True):
        assert (master - other).abs().max() < 1e-2 * (other.detach() - start).abs().mean()
        assert torch.equal(parameter, master.to(parameter.dtype))
    assert not torch.equal(parameters[0], begun[0].bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_optimizer_continues_to_the_bit(kind):
    parameters, optimizer, config = make(kind)
    steps(parameters, optimizer, config, 3)
    file, weights = io.BytesIO(), [parameter.detach().clone() for parameter in parameters]
    torch.save(optimizer.state_dict(), file)
    rng = torch.get_rng_state()
    steps(parameters, optimizer, config, 3, first=3)
    again, restored, _ = make(kind)
    for parameter, weight in zip(again, weights, strict=True):
        parameter.data.copy_(weight)
    file.seek(0)
    restored.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    torch.set_rng_state(rng)
    steps(again, restored, config, 3, first=3)
    assert all(map(torch.equal, parameters, again))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].get("weights")])
def test_small_updates_are_taken(kind):
    """100 steps of 1e-4 from 1; stochastic ones are of h = 2^-8, with probability 1e-4 / h."""
    parameters, optimizer, config = make(kind, learning_rate=1e-4)
    parameters[0].data.fill_(1.0)
    steps(parameters, optimizer, config, 100, torch.ones_like)
    weights, h = parameters[0].detach().float(), 2**-8
    bound = 5 * (100 * 1e-4 * (h - 1e-4) / weights.numel()) ** 0.5 if "stoch" in kind else h / 2
    assert abs(weights.mean() - 0.99) < bound
    assert (len(weights.unique()) > 3) == ("stoch" in kind)


def test_gradients_are_clipped_or_leave_the_weights_if_not_finite():
    parameters, optimizer, config = make("float32", max_grad_norm=1.0)
    before = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises(FloatingPointError, match="the gradients of step 8 are not finite"):
        steps(parameters, optimizer, config, 1, lambda p: p.detach() * torch.nan, first=7)
    assert all(map(torch.equal, parameters, before))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    norm = sum(parameter.numel() for parameter in parameters) ** 0.5
    assert apply(optimizer, config, 0) == pytest.approx(norm)
    moment = optimizer.state[parameters[1]]["exp_avg"]
    torch.testing.assert_close(moment, torch.full((128,), 0.1 / norm))
    apply(optimizer, config, 1)  # without gradients they are 0: the moments decay
    torch.testing.assert_close(moment, torch.full((128,), 0.09 / norm))


def test_what_cannot_be_optimized_is_refused(monkeypatch):
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    trained = torch.nn.Parameter(torch.ones(3))
    (group,) = make_optimizer([frozen, trained], GrpoConfig(), lr=0.5).param_groups
    assert (len(group["params"]), group["params"][0] is trained, group["lr"]) == (1, True, 0.5)
    with pytest.raises(ValueError, match="no parameter is left to train"):
        make_optimizer([frozen], GrpoConfig())
    monkeypatch.setitem(sys.modules, "fastrl.train.torchao_optimizers", None)
    monkeypatch.delattr(fastrl.train, "torchao_optimizers", raising=False)
    for kind in ("eight_bit", "stochastic"):
        with pytest.raises(ValueError, match=r"need torchao: .*fastrl-kernels\[lowbit\]"):
            make_optimizer([trained], GrpoConfig(**KINDS[kind]))


@pytest.mark.parametrize(
    ("schedule", "quarter", "half", "end"),
    [("constant", 1, 1, 1), ("linear", 0.775, 0.55, 0.1), ("cosine", 0.868198, 0.55, 0.1)],
)
def test_the_rate_rises_then_follows_its_schedule_and_is_never_0(schedule, quarter, half, end):
    def rates(steps, warmup):
        options = {"steps": steps, "warmup_steps": warmup, "learning_rate": 1.0}
        config = GrpoConfig(schedule=schedule, **options)
        return [learning_rate(config, step) for step in range(steps)]

    found, longer = rates(21, 4), rates(37, 4)  # as if the run were resumed for more steps
    assert longer[:5] == found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert (found[8], found[12], found[20]) == pytest.approx((quarter, half, end))
    assert (longer[12], longer[20]) == pytest.approx((quarter, half))
    assert min(rates(1, 0) + rates(1, 3) + rates(4, 30)) > 0
