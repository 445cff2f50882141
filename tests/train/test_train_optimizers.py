"""Optimizers lose no small updates of bfloat16 weights and resume to the bit; rates, clipping."""

import io
import sys

import pytest
import torch

pytest.importorskip("transformers")

import fastrl.train
from fastrl.train.config import GrpoConfig
from fastrl.train.optimizers import MasterWeights, apply, learning_rate, make_optimizer

BF16 = {"weights": "bfloat16"}
STOCHASTIC = {**BF16, "rounding": "stochastic"}
EIGHT_BIT = {"optimizer": "adamw_8bit"}
KINDS = {
    "float32": {},
    "masters": BF16,
    "stochastic": STOCHASTIC,
    "eight_bit": EIGHT_BIT,
    "eight_bit_masters": BF16 | EIGHT_BIT,
    "eight_bit_stochastic": STOCHASTIC | EIGHT_BIT,
    "offloaded": BF16,
}
# the largest is quantized to 8 bits, the last is float32 always, as a value head is
SHAPES = ((64, 128), (128,), (7,))


def make(kind, **changes):
    """Parameters, their optimizer and configuration."""
    if "eight_bit" in kind or "stochastic" in kind:
        pytest.importorskip("torchao")
    common = {"learning_rate": 0.1, "warmup_steps": 0, "schedule": "constant", "max_grad_norm": 1e9}
    config = GrpoConfig(**{**common, **KINDS[kind], **changes})
    torch.manual_seed(0)
    dtypes = [*[getattr(torch, config.weights)] * 2, torch.float32]
    pairs = zip(SHAPES, dtypes, strict=True)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape, dtype in pairs]
    if kind != "offloaded":
        return parameters, make_optimizer(parameters, config), config
    options = {"lr": config.learning_rate, "weight_decay": 0.0}  # refused on a CPU, hence by hand
    new = lambda copies: torch.optim.AdamW(copies, fused=True, **options)  # noqa: E731
    return (
        parameters,
        MasterWeights(parameters, new, device=torch.device("cpu"), options=options),
        config,
    )


def steps(parameters, optimizer, config, count, gradient=torch.randn_like, first=0):
    for step in range(first, first + count):
        for parameter in parameters:
            parameter.grad = gradient(parameter)
        apply(optimizer, config, step)


@pytest.mark.parametrize("kind", ["masters", "offloaded"])
def test_master_copies_are_those_of_adamw_in_float64(kind):
    """Each weight is its copy, rounded; also if it changed before the first step."""
    parameters, optimizer, config = make(kind, learning_rate=1e-4, schedule="linear", steps=60)
    with torch.no_grad():
        parameters[1].fill_(5.0)
    exact = [torch.nn.Parameter(parameter.detach().double()) for parameter in parameters]
    begun = [parameter.detach().clone() for parameter in exact]
    reference = torch.optim.AdamW(exact, lr=config.learning_rate, weight_decay=0.0)
    for step in range(60):
        for parameter, other in zip(parameters, exact, strict=True):
            parameter.grad = (1 + torch.randn(parameter.shape)).to(parameter.dtype)
            other.grad = parameter.grad.double()
        apply(optimizer, config, step)
        reference.param_groups[0]["lr"] = learning_rate(config, step)
        reference.step()
    masters = optimizer.state_dict()["masters"]
    assert masters[2] is None  # it is its own
    masters[2] = parameters[2].detach()
    for parameter, master, other, start in zip(parameters, masters, exact, begun, strict=True):
        moved = (other.detach() - start).abs().mean()
        assert (master - other).abs().max() < 1e-2 * moved
        assert torch.equal(parameter, master.to(parameter.dtype))
    assert not torch.equal(parameters[0], begun[0].bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_optimizer_continues_to_the_bit(kind):
    parameters, optimizer, config = make(kind)
    steps(parameters, optimizer, config, 3)
    file, weights = io.BytesIO(), [p.detach().clone() for p in parameters]
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
    assert not torch.equal(parameters[0], weights[0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "float32"])
def test_small_updates_are_taken(kind):
    """Steps of 1e-4 from 1, where the next lower bfloat16 is 1 - h; on average if stochastic.

    A weight falls by h with probability p = 1e-4 / h in each step: variance 100 p (1 - p) h^2.
    """
    parameters, optimizer, config = make(kind, learning_rate=1e-4)
    for parameter in parameters:
        parameter.data.fill_(1.0)
    steps(parameters, optimizer, config, 100, torch.ones_like)
    weights, h = parameters[0].detach().float(), 2**-8
    p = 1e-4 / h
    bound = 5 * (100 * p * (1 - p) * h**2 / weights.numel()) ** 0.5 if "stoch" in kind else h / 2
    assert abs(weights.mean() - 0.99) < bound
    assert (len(weights.unique()) > 3) == ("stoch" in kind)


@pytest.mark.parametrize("kind", ["stochastic", "eight_bit_stochastic"])
def test_the_second_moment_decays(kind):
    """In bfloat16 it would not: 0.999 of a number rounds to that number."""
    parameters, optimizer, config = make(kind)
    steps(parameters, optimizer, config, 1, torch.ones_like)
    steps(parameters, optimizer, config, 200, torch.zeros_like)
    moment = optimizer.state_dict()["state"][1]["exp_avg_sq"]
    torch.testing.assert_close(moment, torch.full((128,), 1e-3 * 0.999**200))


def test_eight_bits_do_not_move_the_rows_of_rare_tokens_more_than_adamw():
    """Rows of one block: gradients of every step, and a thousandth of them in every tenth."""

    def moved(kind):
        (weight, *_), optimizer, config = make(kind, learning_rate=1e-4)
        start, generator = weight.detach().clone(), torch.Generator().manual_seed(0)
        for step in range(50):
            weight.grad = torch.randn(64, 128, generator=generator) * 1e-2
            weight.grad[1::2] *= 0 if step % 10 else 1e-3
            apply(optimizer, config, step)
            if step == 25:
                optimizer.load_state_dict(optimizer.state_dict())
        far = (weight.detach() - start).abs()
        return far[::2].max(), far[1::2].max()

    (frequent, rare), (frequent_of_adamw, rare_of_adamw) = moved("eight_bit"), moved("float32")
    assert 0.5 < frequent / frequent_of_adamw < 2
    assert 0.1 < rare / rare_of_adamw < 2  # hundreds where second moments round to 0


def test_gradients_are_clipped_or_leave_the_weights_if_not_finite():
    parameters, optimizer, config = make("float32", max_grad_norm=1.0)
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    parameters[1].grad[3] = torch.nan
    with pytest.raises(FloatingPointError, match="the gradients of step 8 are not finite"):
        apply(optimizer, config, 7)
    assert all(map(torch.equal, parameters, before))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in parameters)
    assert apply(optimizer, config, 0) == pytest.approx(count**0.5)
    moment = optimizer.state[parameters[0]]["exp_avg"]
    torch.testing.assert_close(moment, torch.full((64, 128), 0.1 / count**0.5))
    apply(optimizer, config, 1)  # without gradients they are 0: the moments decay
    torch.testing.assert_close(moment, torch.full((64, 128), 0.09 / count**0.5))


def test_what_cannot_be_optimized_is_refused(monkeypatch):
    frozen, trained = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    frozen.requires_grad_(False)
    (group,) = make_optimizer([frozen, trained], GrpoConfig(), lr=0.5).param_groups
    assert group["params"][0] is trained
    assert (len(group["params"]), group["lr"]) == (1, 0.5)
    with pytest.raises(ValueError, match="no parameter is left to train"):
        make_optimizer([frozen], GrpoConfig())
    with pytest.raises(ValueError, match='optimizer must not be "adamw_offloaded" on the device'):
        make_optimizer([trained], GrpoConfig(optimizer="adamw_offloaded"))
    monkeypatch.setitem(sys.modules, "fastrl.integrations.torchao", None)
    monkeypatch.delattr(fastrl.integrations, "torchao", raising=False)
    for settings in (EIGHT_BIT, STOCHASTIC):
        with pytest.raises(ValueError, match=r"need torchao: .*fastrl-kernels\[lowbit\]"):
            make_optimizer([trained], GrpoConfig(**settings))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_rate_rises_then_follows_its_schedule_and_is_never_0(schedule):
    def rates(**settings):
        config = GrpoConfig(schedule=schedule, learning_rate=1.0, **settings)
        return [learning_rate(config, step) for step in range(config.steps)]

    assert rates(steps=11, warmup_steps=0)[5] == pytest.approx(
        1 if schedule == "constant" else 0.55
    )
    found = rates(steps=21, warmup_steps=4)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[-1] == pytest.approx(1 if schedule == "constant" else 0.1)
    assert found[5:] == sorted(found[5:], reverse=True)
    quarter = {"constant": 1, "linear": 0.775, "cosine": 0.1 + 0.45 * (1 + 0.5**0.5)}[schedule]
    assert found[8] == pytest.approx(quarter)
    longer = rates(steps=41, warmup_steps=4)  # as if this run were resumed for more steps
    assert longer[:5] == found[:5]
    assert longer[20] > found[20] or schedule == "constant"
    for warmup in (0, 3, 30):
        assert min(rates(steps=1, warmup_steps=warmup) + rates(steps=4, warmup_steps=warmup)) > 0
