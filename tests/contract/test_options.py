"""Options: presets, numbers of NumPy, types; two results that once were wrong or slow."""

import dataclasses
import inspect
import math
import typing

import numpy as np
import pytest
import torch
from test_objectives import one_token

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.contract import SURROGATES
from fastrl.objective.presets import CONVENTIONS, PRESETS, Preset

ones, zeros = torch.ones, torch.zeros
ids = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("convention", "name"), [(c, name) for c, presets in CONVENTIONS.items() for name in presets]
)
def test_a_preset_may_set_fields_of_terms_that_are_off(convention, name):
    """Its KL is the trainer's even if the coefficient is set later."""
    later = dataclasses.replace(
        Objective.preset(name, convention=convention), kl_coef=0.1, entropy_coef=0.1
    )
    assert later == Objective.preset(name, convention=convention, kl_coef=0.1, entropy_coef=0.1)
    assert dataclasses.replace(later, kl_coef=None, entropy_coef=0.0) == Objective.preset(
        name, convention=convention
    )


@pytest.mark.parametrize(("convention", "estimator"), [("trl", "exact"), ("verl", "k2")])
def test_a_convention_leaves_alone_what_its_trainer_does_not_have(convention, estimator):
    """TRL weights, and verl clamps, only k3."""
    o = Objective.preset("grpo", convention=convention, kl_coef=0.1, kl_estimator=estimator)
    assert (o.kl_gradient, o.kl_clamp) == ("exact", None)


def test_a_preset_of_trl_may_have_the_surrogate_of_gmpo():
    o = Objective.preset("gspo", convention="trl", surrogate="gmpo", clip_low=0.4, clip_high=0.4)
    assert o.kl_gradient == "exact"


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
