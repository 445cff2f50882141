"""Optimizers: they learn, resume to the bit, and lose no small updates of bfloat16 weights."""

import importlib.util
import io

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.config import GrpoConfig
from fastrl.train.gradients import apply
from fastrl.train.optimizers import make_optimizer, offloaded

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
    "offloaded": {"optimizer": "adamw_offloaded"},
    "offloaded_bfloat16": BF16 | {"optimizer": "adamw_offloaded"},
}
# the largest is quantized to 8 bits, the last is float32 always, as a value head is
SHAPES = ((64, 128), (128,), (7,))


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small: threads would cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(kind, **changes):
    """Parameters, their optimizer and configuration."""
    if "eight_bit" in kind or "stochastic" in kind:
        pytest.importorskip("torchao")
    config = GrpoConfig(
        **{"learning_rate": 0.1, "warmup_steps": 0, "max_grad_norm": 1e9, **KINDS[kind], **changes}
    )
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in SHAPES]
    dtypes = [*[getattr(torch, config.weights)] * 2, torch.float32]
    parameters = [torch.nn.Parameter(w.to(dtype)) for w, dtype in zip(weights, dtypes, strict=True)]
    if "offloaded" in kind:  # make_optimizer refuses it on the CPU
        options = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        return parameters, offloaded(parameters, options), config
    return parameters, make_optimizer(parameters, config), config


def set_gradients(parameters, gradient):
    for i, parameter in enumerate(parameters):
        parameter.grad = gradient(i, parameter)


@pytest.mark.parametrize("continued", [False, True])
def test_eight_bits_do_not_move_the_rows_of_rare_tokens_more_than_adamw(continued):
    """Rows of one block: gradients of every step, and a thousandth of them in every tenth."""
    pytest.importorskip("torchao")

    def moved(**optimizer):
        config = GrpoConfig(learning_rate=1e-4, warmup_steps=0, max_grad_norm=1e9, **optimizer)
        weight = torch.nn.Parameter(torch.zeros(64, 128))
        step_with = make_optimizer([weight], config)
        generator = torch.Generator().manual_seed(0)
        for step in range(50):
            weight.grad = torch.randn(64, 128, generator=generator) * 1e-2
            weight.grad[1::2] *= 0 if step % 10 else 1e-3
            apply(step_with, config, 0)
            if continued and step == 25:
                saved = step_with.state_dict()
                step_with = make_optimizer([weight], config)
                step_with.load_state_dict(saved)
        return weight.detach()[::2].abs().max(), weight.detach()[1::2].abs().max()

    (frequent, rare), (frequent_of_adamw, rare_of_adamw) = moved(**EIGHT_BIT), moved()
    assert 0.5 < frequent / frequent_of_adamw < 2
    assert 0.1 < rare / rare_of_adamw < 2  # hundreds where second moments round to 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_finds_the_minimum(kind):
    parameters, optimizer, config = make(kind)
    targets = [torch.randn(shape) for shape in SHAPES]

    def distance():
        pairs = zip(parameters, targets, strict=True)
        return max(float((p.detach() - target).abs().max()) for p, target in pairs)

    before = distance()
    for _ in range(250):
        set_gradients(parameters, lambda i, p: (p.detach() - targets[i]).to(p.dtype))
        apply(optimizer, config, 0)
    assert before > 3
    assert distance() < 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_optimizer_continues_to_the_bit(kind):
    parameters, optimizer, config = make(kind)

    def step(parameters, optimizer, count):
        for i in range(count):
            set_gradients(parameters, lambda _, p: torch.randn_like(p))
            apply(optimizer, config, i)

    step(parameters, optimizer, 3)
    file, weights = io.BytesIO(), [p.detach().clone() for p in parameters]
    torch.save(optimizer.state_dict(), file)
    rng = torch.get_rng_state()
    step(parameters, optimizer, 3)

    again, restored, _ = make(kind)
    with torch.no_grad():
        for parameter, weight in zip(again, weights, strict=True):
            parameter.copy_(weight)
    file.seek(0)
    restored.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    torch.set_rng_state(rng)
    step(again, restored, 3)
    assert all(torch.equal(one, other) for one, other in zip(parameters, again, strict=True))
    assert not torch.equal(parameters[0], weights[0])


def descend(parameters, optimizer, config, steps=100):
    """Steps of 1e-4 from 1, where the next lower number of bfloat16 is 1 - 2^-8."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(1.0)
    for _ in range(steps):
        set_gradients(parameters, lambda _, p: torch.ones_like(p))
        apply(optimizer, config, 0)
    return parameters[0].detach()


def test_plain_bfloat16_loses_small_updates():
    parameters, _, config = make("masters", learning_rate=1e-4)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0)
    assert torch.equal(descend(parameters, optimizer, config), torch.ones(64, 128).bfloat16())


@pytest.mark.parametrize("kind", ["masters", "eight_bit_masters", "offloaded_bfloat16"])
def test_master_copies_take_small_updates(kind):
    parameters, optimizer, config = make(kind, learning_rate=1e-4)
    weights = descend(parameters, optimizer, config)
    # the updates of an 8-bit optimizer are within its quantization
    expected = torch.full_like(weights, 0.99)
    torch.testing.assert_close(weights, expected, rtol=0, atol=2**-8 if "8" in kind else 0)
    master = optimizer.state_dict()["masters"][0]
    torch.testing.assert_close(master, torch.full((64, 128), 0.99), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["stochastic", "eight_bit_stochastic"])
def test_stochastic_rounding_takes_small_updates_on_average(kind):
    """A weight falls by h = 2^-8 with probability p = 1e-4 / h in each of the steps.

    The mean of n weights has the variance steps p (1 - p) h^2 / n.
    """
    parameters, optimizer, config = make(kind, learning_rate=1e-4)
    weights = descend(parameters, optimizer, config).float()
    h = 2**-8
    p = 1e-4 / h
    deviation = (100 * p * (1 - p) * h**2 / weights.numel()) ** 0.5
    assert abs(weights.mean() - 0.99) < 5 * deviation
    assert len(weights.unique()) > 3


@pytest.mark.parametrize("kind", ["stochastic", "eight_bit_stochastic"])
def test_the_second_moment_decays(kind):
    """In bfloat16 it would not: 0.999 of a number rounds to that number."""
    parameters, optimizer, config = make(kind, learning_rate=1e-4)
    set_gradients(parameters, lambda _, p: torch.ones_like(p))
    apply(optimizer, config, 0)
    for _ in range(200):
        set_gradients(parameters, lambda _, p: torch.zeros_like(p))
        apply(optimizer, config, 0)
    moment = optimizer.state_dict()["state"][1]["exp_avg_sq"]
    torch.testing.assert_close(moment, torch.full((128,), 1e-3 * 0.999**200))


@pytest.mark.parametrize("kind", KINDS)
def test_the_learning_rate_of_the_step_is_taken(kind):
    parameters, optimizer, _ = make(kind)
    before = [parameter.detach().clone() for parameter in parameters]
    set_gradients(parameters, lambda _, p: torch.ones_like(p))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(map(torch.equal, parameters, before))


def test_offloading_changes_no_update():
    (one, optimizer, config), (other, host, _) = make("float32"), make("offloaded")
    for i in range(5):
        for parameters, stepped in ((one, optimizer), (other, host)):
            torch.manual_seed(i)
            set_gradients(parameters, lambda _, p: torch.randn_like(p))
            apply(stepped, config, i)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["masters", "offloaded_bfloat16"])
def test_weights_may_change_before_the_first_step(kind):
    """The warm start comes between the optimizer and its first step."""
    parameters, optimizer, config = make(kind, learning_rate=1e-4)
    with torch.no_grad():
        parameters[0].fill_(5.0)
    set_gradients(parameters, lambda _, p: torch.ones_like(p))
    apply(optimizer, config, 0)
    assert torch.equal(parameters[0], torch.full((64, 128), 5.0).bfloat16())


def test_frozen_parameters_are_left_out():
    frozen, trained = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    frozen.requires_grad_(False)
    optimizer = make_optimizer([frozen, trained], GrpoConfig())
    assert [p is trained for g in optimizer.param_groups for p in g["params"]] == [True]
    with pytest.raises(ValueError, match="no parameter is left to train"):
        make_optimizer([frozen], GrpoConfig())


def test_the_arguments_of_the_warm_start_replace_the_settings():
    (group,) = make_optimizer(
        [torch.nn.Parameter(torch.ones(3))], GrpoConfig(), lr=0.5, betas=(0.9, 0.98)
    ).param_groups
    assert (group["lr"], group["betas"]) == (0.5, (0.9, 0.98))


def test_nothing_is_offloaded_on_the_cpu():
    parameters = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match='optimizer must not be "adamw_offloaded" on the device'):
        make_optimizer(parameters, GrpoConfig(optimizer="adamw_offloaded"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [(EIGHT_BIT, "optimizer=adamw_8bit needs"), (STOCHASTIC, "rounding=stochastic needs")],
)
def test_a_missing_torchao_is_named(monkeypatch, settings, message):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "fastrl.train.extras.find_spec", lambda name: None if name == "torchao" else found(name)
    )
    with pytest.raises(ValueError, match=rf"{message} torchao.*fastrl-kernels\[lowbit\]"):
        make_optimizer([torch.nn.Parameter(torch.ones(3))], GrpoConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounding": "stochastic"}, 'rounding must be "master" with weights=float32'),
        ({**STOCHASTIC, "lora_rank": 4}, 'rounding must be "master" with lora_rank=4'),
        (
            {**STOCHASTIC, "optimizer": "adamw_offloaded"},
            'rounding must be "master" with optimizer=adamw_offloaded',
        ),
        ({"dora": True}, "dora must be used with lora_rank"),
        ({"lora_alpha": 8.0}, "lora_alpha must be used with lora_rank"),
        ({"lora_targets": ["q_proj"]}, "lora_targets must be used with lora_rank"),
        ({"lora_rank": 4, "lora_targets": []}, "lora_targets must name a layer"),
        (
            {"lora_rank": 4, "lora_targets": ["all-linear", "lm_head"]},
            "lora_targets must be all-linear or names of layers",
        ),
        ({"lora_rank": 0}, "lora_rank must be at least 1, got 0"),
    ],
)
def test_settings_that_exclude_one_another(settings, message):
    with pytest.raises(ValueError, match=message):
        GrpoConfig(**settings)
