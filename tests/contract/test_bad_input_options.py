"""Meaningless options, which once passed silently or raised an obscure error."""

import dataclasses
import inspect
import math
import typing

import numpy as np
import pytest
import torch
from test_bad_input import cases, loss, refuses
from test_objectives import one_token

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.contract import SURROGATES
from fastrl.objective.presets import CONVENTIONS, PRESETS, Preset

ones, zeros = torch.ones, torch.zeros
logits, ids = zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
KL_AND_MEAN = {"kl_coef": 0.1, "kl_aggregation": "token-sum"}


def with_normalizer(value, **objective):
    ref = zeros(2, 3) if objective else None
    return loss(Objective(**objective), normalizer=value, ref_logprobs=ref)


def metrics_of(**changes):
    return fastrl.reduce_metrics({**loss().metrics, **changes})


def overlapping():
    """Rows of five logits that start two elements apart; not a leaf, as `inplace` requires."""
    flat = torch.randn(20, requires_grad=True) * 1
    return flat.as_strided((2, 3, 5), (6, 2, 1))


CALLS = [
    # normalizer
    (
        lambda: with_normalizer({}, **KL_AND_MEAN),
        ValueError,
        "normalizer must contain ... got none",
    ),
    (lambda: with_normalizer(True), TypeError, "normalizer must be a number, got bool"),
    (lambda: with_normalizer(2 + 1j), TypeError, "normalizer must be a number, got complex"),
    (
        lambda: with_normalizer(torch.tensor(2 + 1j)),
        TypeError,
        "normalizer must be a number or a real tensor, got torch.complex64",
    ),
    (
        lambda: with_normalizer(torch.tensor(True)),
        TypeError,
        "normalizer must be a number or a real tensor, got torch.bool",
    ),
    # dtypes
    *(
        (
            lambda dtype=dtype: fastrl.token_logprobs(logits.to(dtype), ids),
            TypeError,
            f"logits must be a floating-point tensor (float32, ... got {dtype}",
        )
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    ),
    (
        lambda: fastrl.linear_token_logprobs(
            zeros(2, 3, 4), zeros(5, 4).to(torch.float8_e4m3fn), ids
        ),
        TypeError,
        "weight must be a floating-point tensor (float32, ... got torch.float8_e4m3fn",
    ),
    (
        lambda: loss(mask=ones(2, 3).to(torch.float8_e4m3fn)),
        TypeError,
        "mask must be bool, integer or float 0/1, got torch.float8_e4m3fn",
    ),
    # a mask of None
    *(
        (lambda call=call: call(None), TypeError, "mask must be a tensor, got NoneType")
        for call in (
            lambda mask: loss(mask=mask),
            lambda mask: fastrl.logits_policy_loss(logits, ids, zeros(2), mask),
            lambda mask: fastrl.linear_policy_loss(
                zeros(2, 3, 4), zeros(5, 4), ids, zeros(2), mask
            ),
        )
    ),
    # functions that return no loss
    (
        lambda: loss(lambda logprobs, old, ref, advantages: logprobs > 0),
        TypeError,
        "objective must return a floating-point loss, got torch.bool",
    ),
    (
        lambda: loss(lambda logprobs, old, ref, advantages: logprobs.detach()),
        ValueError,
        "objective must return a loss that is differentiable in logprobs, got a constant",
    ),
    (
        lambda: loss(lambda logprobs, old, ref, advantages: logprobs.to_sparse()),
        TypeError,
        "objective must return a dense tensor, got torch.sparse_coo",
    ),
    # groups without members
    (
        lambda: fastrl.group_advantages(zeros(0), group_size=-3),
        ValueError,
        "group_size must be at least 1, got -3",
    ),
    (
        lambda: fastrl.group_advantages(zeros(0), group_size="x"),
        TypeError,
        "group_size must be an int, got str",
    ),
    # invalid metrics
    (
        lambda: metrics_of(kl=zeros(3)),
        ValueError,
        "metrics['kl'] must be a 0-d tensor, got shape (3,)",
    ),
    (lambda: metrics_of(kl=0.5), TypeError, "metrics['kl'] must be a tensor, got float"),
    (
        lambda: metrics_of(kl=torch.tensor(1)),
        TypeError,
        "metrics['kl'] must be a floating-point tensor ... got torch.int64",
    ),
    (
        lambda: metrics_of(kl=zeros((), device="meta")),
        ValueError,
        "metrics['kl'] must be on cpu like the others, got a tensor on meta",
    ),
    # integers beyond 64 bits
    (
        lambda: fastrl.token_logprobs(logits, ids, ignore_index=2**70),
        ValueError,
        "ignore_index must be below 2**63, got 1180591620717411303424",
    ),
    (
        lambda: fastrl.token_logprobs(logits, ids, ignore_index=-(2**70)),
        ValueError,
        "ignore_index must be at least -9223372036854775808, got",
    ),
    (
        lambda: fastrl.linear_token_logprobs(zeros(2, 3, 4), zeros(5, 4), ids, chunk_tokens=2**70),
        ValueError,
        "chunk_tokens must be below 2**63, got 1180591620717411303424",
    ),
    # rows that share memory
    (
        lambda: fastrl.logits_policy_loss(overlapping(), ids, zeros(2), ones(2, 3), inplace=True),
        ValueError,
        "inplace=True needs logits whose rows do not share memory, got strides (6, 2, 1)",
    ),
    (
        lambda: fastrl.token_logprobs(overlapping(), ids, inplace_backward=True),
        ValueError,
        "inplace_backward=True needs logits whose rows do not share memory",
    ),
    # decreasing cu_seqlens
    *(
        (
            lambda dtype=dtype: loss(
                logprobs=zeros(8),
                mask=ones(8),
                advantages=zeros(3),
                cu_seqlens=torch.tensor([0, 5, 3, 8], dtype=dtype),
            ),
            ValueError,
            "cu_seqlens must rise from 0 to the number of tokens 8, got [0, 5, 3, 8]",
        )
        for dtype in (torch.uint8, torch.uint16, torch.int8, torch.int64)
    ),
    # temperatures without an inverse in float32
    (
        lambda: fastrl.token_logprobs(logits, ids, temperature=1e-39),
        ValueError,
        "temperature must lie in [1e-30, 1e+30] given logit_scale, or float32 ... got 1e-39",
    ),
    *(
        (
            lambda name=name, value=value: fastrl.token_logprobs(logits, ids, **{name: value}),
            ValueError,
            f"{name} must lie in [1e-30, ... got {value}",
        )
        for name in ("temperature", "logit_scale", "logit_softcap")
        for value in (1e-320, 1e35)
    ),
    (
        lambda: fastrl.token_logprobs(logits, ids, logit_scale=1e10, logit_softcap=1e-25),
        ValueError,
        "logit_softcap must lie in [1e-20, 1e+30] given logit_scale, ... got 1e-25",
    ),
    (
        lambda: fastrl.token_logprobs(logits, ids, temperature=1e-29, logit_scale=100.0),
        ValueError,
        "temperature must lie in [1e-28, 1e+30] given logit_scale, ... got 1e-29",
    ),
    (
        lambda: fastrl.token_logprobs(logits, ids, temperature=1e-29, logit_softcap=30.0),
        ValueError,
        "temperature must lie in [3e-29, 1e+30] given logit_scale and logit_softcap, ... got 1e-29",
    ),
    (
        lambda: fastrl.token_logprobs(logits, ids, temperature=torch.tensor([1.0, 1e-40])),
        ValueError,
        "temperature must lie in [1e-30, 1e+30] given logit_scale, ... got 9.99",
    ),
    (
        lambda: fastrl.token_logprobs(logits, ids, temperature=torch.tensor(1e35)),
        ValueError,
        "temperature must lie in [1e-30, 1e+30] given logit_scale, ... got 1.00",
    ),
    (
        lambda: fastrl.token_logprobs(logits, ids, logit_scale=1e-20, temperature=1e20),
        ValueError,
        "temperature must lie in [1e-30, 1e+10] given logit_scale, ... got 1e+20",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), [
    pytest.param(*row, id=f"{i}: {row[-1]}") for i, row in enumerate(CALLS)
])  # fmt: skip
def test_it_is_refused(call, error, message):
    refuses(call, error, message)


WITHOUT_EFFECT = [
    ({"kl_clamp": 10.0}, ValueError, "kl_clamp has no effect without kl_coef; got kl_clamp=10.0"),
    ({"kl_gradient": "straight-through"}, ValueError, "kl_gradient has no effect without kl_coef"),
    ({"kl_estimator": "k1"}, ValueError, "kl_estimator has no effect without kl_coef"),
    ({"kl_aggregation": "token-sum"}, ValueError, "kl_aggregation has no effect without kl_coef"),
    (
        {"entropy_aggregation": "token-sum"},
        ValueError,
        "entropy_aggregation has no effect without entropy_coef",
    ),
    ({"rollout_weighs": "policy"}, ValueError, "rollout_weighs has no effect without rollout_corr"),
    ({"rollout_correction": ()}, ValueError, "rollout_correction must contain at least one"),
    ({"convention": "ppo"}, ValueError, "convention must be one of fastrl, trl, verl, openrlhf"),
]


@pytest.mark.parametrize(("fields", "error", "message"), cases(WITHOUT_EFFECT))
def test_a_field_without_effect_is_refused(fields, error, message):
    refuses(lambda: Objective(**fields), error, message)
    refuses(lambda: Objective.preset("grpo", **fields), error, message)


@pytest.mark.parametrize(
    ("convention", "name"), [(c, name) for c, presets in CONVENTIONS.items() for name in presets]
)
def test_a_preset_may_set_fields_of_terms_that_are_off(convention, name):
    """Its KL is the trainer's even if the coefficient is set later."""
    later = dataclasses.replace(
        Objective.preset(name, convention=convention), kl_coef=0.1, entropy_coef=0.1
    )
    assert later == Objective.preset(name, convention=convention, kl_coef=0.1, entropy_coef=0.1)
    assert dataclasses.replace(later, kl_coef=0.0, entropy_coef=0.0) == Objective.preset(
        name, convention=convention
    )


def test_other_fields_of_terms_that_are_off_are_refused():
    refuses(
        lambda: Objective.preset("ppo", convention="verl", kl_clamp=5.0),
        ValueError,
        "kl_clamp has no effect without kl_coef",
    )


NUMBERS = [np.float32(0.25), np.float64(0.25), np.float16(0.25)]
WHOLE = [np.int64(2), np.int32(2), np.uint8(2)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: type(x).__name__)
def test_a_numpy_number_is_a_number(backend, number):
    o = Objective(clip_low=number, clip_high=number, kl_coef=number, kl_clamp=4 * number)
    assert o == Objective(clip_low=0.25, clip_high=0.25, kl_coef=0.25, kl_clamp=1.0)
    assert all(type(x) is float for x in (o.clip_low, o.clip_high, o.kl_coef, o.kl_clamp))
    assert RolloutCorrection(low=number, high=4 * number) == RolloutCorrection(low=0.25, high=1.0)
    assert Objective(log_ratio_clamp=(-number, number)).log_ratio_clamp == (-0.25, 0.25)
    for options in ({"temperature": number}, {"logit_scale": number}, {"logit_softcap": number}):
        expected = dict.fromkeys(options, 0.25)
        found, wanted = (
            fastrl.token_logprobs(torch.arange(5.0)[None], ids[0, :1], **given, backend=backend)
            for given in (options, expected)
        )
        assert torch.equal(found, wanted)
    assert one_token(backend, 0.1, 1.0, clip_low=number) == one_token(
        backend, 0.1, 1.0, clip_low=0.25
    )
    fastrl.gae(ones(1, 2), ones(1, 2), gamma=number, lam=number, backend=backend)
    fastrl.token_weights(ones(1, 2), aggregation="token-mean", normalizer=number)


@pytest.mark.parametrize("number", WHOLE, ids=lambda x: type(x).__name__)
def test_a_numpy_integer_is_an_integer(backend, number):
    rewards = torch.tensor([1.0, 2.0, 3.0, 5.0])
    found, wanted = (
        fastrl.group_advantages(rewards, group_size=size, backend=backend).advantages
        for size in (number, 2)
    )
    assert torch.equal(found, wanted)
    fastrl.linear_token_logprobs(
        zeros(2, 3, 4), zeros(5, 4), ids, chunk_tokens=number, ignore_index=number, backend=backend
    )
    assert fastrl.masked_mean(ones(1, 1, 3), ones(1, 1, 3), dim=number).shape == (1, 1)
    fastrl.token_weights(ones(2, 2), aggregation="prompt-mean", group_size=number)


def test_a_numpy_bool_is_not_a_number():
    refuses(lambda: Objective(kl_coef=np.True_), TypeError, "kl_coef must be a number, got bool")


CHOICES = ("aggregation", "estimator", "backend", "baseline", "scale", "singleton", "convention")


@pytest.mark.parametrize(
    "name", [n for n in fastrl.__all__ if inspect.isfunction(getattr(fastrl, n))]
)
def test_a_type_checker_finds_a_typo(name):
    function = getattr(fastrl, name)
    hints = typing.get_type_hints(function)
    for parameter in inspect.signature(function).parameters:
        if parameter in CHOICES:
            kinds = typing.get_args(hints[parameter]) or (hints[parameter],)
            assert str not in kinds, f"{name}({parameter})"
            assert typing.get_args(hints[parameter]), f"{name}({parameter})"


def test_the_names_of_the_presets_are_a_type():
    assert typing.get_args(Preset) == tuple(PRESETS)
    assert set(SURROGATES) >= {Objective.preset(name).surrogate for name in PRESETS}


def test_zero_over_a_standard_deviation_of_zero_is_zero(backend):
    """With eps=0 and equal values, or without degrees of freedom."""
    for rewards, options in (
        ([0.0, 0.0, 2.0, 2.0], {"baseline": "none"}),
        ([1.0, 2.0, 3.0, 5.0], {"correction": 2}),
        ([0.0, 1.0, 0.0, 0.0], {"baseline": "none", "correction": 4, "scale": "batch"}),
    ):
        given = torch.tensor(rewards)
        found = fastrl.group_advantages(given, group_size=2, eps=0, backend=backend, **options)
        numerator = given if "baseline" in options else given - found.mean
        expected = [math.copysign(math.inf, x) if x else 0.0 for x in numerator.tolist()]
        assert found.advantages.tolist() == expected


def test_many_prompts_take_linear_time():
    """20,000 sequences once took 24 s and 3.5 GB, when all pairs were compared."""
    groups = torch.randperm(20_000) // 8
    mask = torch.rand(20_000, 4) > 0.3
    found = fastrl.token_weights(mask, aggregation="prompt-mean", group_ids=groups)
    tokens = torch.zeros(2_500).index_add(0, groups, mask.sum(1).float())
    expected = mask / tokens[groups][:, None] / (tokens > 0).sum()
    torch.testing.assert_close(found, torch.where(mask, expected, 0.0))
