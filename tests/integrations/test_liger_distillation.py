"""Liger's fused distillation loss on fastrl equals its formula and, if it is installed, Liger."""

import types

import pytest
import torch

import fastrl
from fastrl.integrations import liger as ours
from fastrl.integrations.replacing import parameters
from tests.integrations import compared
from tests.integrations.compared import (
    assert_same_parameters,
    close,
    each,
    equal,
    implementations,
)
from tests.integrations.liger_formulas import Distillation
from tests.integrations.packages import importable

INSTALLED = importable("liger_kernel.chunked_loss")
IMPLEMENTATIONS = implementations(
    Distillation, "liger_kernel.chunked_loss", "LigerFusedLinearJSDLoss"
)
theirs = each(IMPLEMENTATIONS)
KIND = ours.LigerFusedLinearJSDLoss


def batch(seed=0, shape=(11,), H=8, H_teacher=6, V=23, more=0, ignore_index=-100):
    torch.manual_seed(seed)
    labels = torch.randint(V, shape)
    labels[torch.rand(shape) < 0.3] = ignore_index
    labels.flatten()[0] = V - 1
    return types.SimpleNamespace(
        student=(torch.randn(*shape, H), 0.5 * torch.randn(V, H)),
        teacher=(torch.randn(*shape, H_teacher), 0.7 * torch.randn(V + more, H_teacher)),
        labels=labels,
        biases=(torch.randn(V), torch.randn(V + more)),
    )


def outcome(loss_function, data, *, biases=True):
    """Loss or losses, and gradients."""

    def run(hidden, weight, own=None, others=None):
        return loss_function(hidden, weight, *data.teacher, data.labels, own, others)

    if not biases:
        return compared.outcome(run, *data.student)
    others = data.biases[1]
    return compared.outcome(lambda *x: run(*x, others), *data.student, data.biases[0])


def compare(theirs, options, data, **more):
    found = (outcome(kind(compiled=False, **options), data, **more) for kind in (KIND, theirs))
    close(*found, 1e-4, 1e-6)


WEIGHTS = {"both": (0.3, 0.9), "soft": (0.0, 1.0), "hard": (1.0, 0.0), "minus": (-0.2, 1.5)}


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_loss_and_gradients(theirs, weights, beta, temperature, asked):
    hard, soft = WEIGHTS[weights]
    options = {"weight_hard_loss": hard, "weight_soft_loss": soft, "beta": beta}
    options |= {"temperature": temperature, "return_soft_hard_loss": asked}
    compare(theirs, options, batch())


#: options, the batch, whether there are biases
CASES = {
    "defaults": ({}, {}, True),
    "no biases": ({"beta": 0.1}, {}, False),
    "padded rows": ({}, {"shape": (3, 5)}, True),
    "another ignored label": ({"ignore_index": 4}, {"ignore_index": 4}, True),
    "chunks": ({"chunk_size": 2}, {}, True),
    "a longer teacher": ({"return_soft_hard_loss": True}, {"more": 3}, True),
    "a longer teacher without biases": ({"weight_hard_loss": 0.0}, {"more": 3}, False),
    "a longer teacher, temperature": ({"temperature": 2.0, "beta": 1.0}, {"more": 1}, True),
    "a longer teacher without weight": ({"weight_soft_loss": 0.0}, {"more": 3}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(theirs, case):
    options, fields, biases = CASES[case]
    compare(theirs, options, batch(seed=1, **fields), biases=biases)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_without_a_label_the_losses_are_0(theirs, temperature):
    data = batch()
    data.labels[:] = -100
    options = {"return_soft_hard_loss": True, "temperature": temperature}
    compare(theirs, options, data)
    assert all(not x.any() for x in outcome(KIND(**options), data))


def test_rows_without_a_label_are_inert():
    data, poisoned = batch(), batch()
    for x in (poisoned.student[0], poisoned.teacher[0]):
        x[poisoned.labels == -100] = float("nan")
    for options in ({"return_soft_hard_loss": True}, {"temperature": 2.0}):
        a, b = (outcome(KIND(**options), x) for x in (data, poisoned))
        equal(a, b)


@pytest.mark.parametrize(
    ("options", "more", "calls"),
    [
        ({}, 0, 1),
        ({"temperature": 2.0}, 0, 2),
        ({"temperature": 2.0, "weight_hard_loss": 0.0}, 0, 1),
        ({"temperature": 2.0, "weight_soft_loss": 0.0}, 0, 1),
        ({"weight_hard_loss": 0.0}, 2, 1),
        ({}, 2, 2),
    ],
)
def test_one_pass_if_both_losses_are_of_the_same_logits(monkeypatch, options, more, calls):
    called, function = [], fastrl.linear_policy_loss

    def counted(*given, **named):
        called.append(named)
        return function(*given, **named)

    monkeypatch.setattr(fastrl, "linear_policy_loss", counted)
    outcome(KIND(**options), batch(more=more))
    assert len(called) == calls


def test_the_losses_that_are_returned_beside_it_have_no_gradient():
    data = batch()
    weight = data.student[1].requires_grad_()
    found = KIND(return_soft_hard_loss=True)(data.student[0], weight, *data.teacher, data.labels)
    assert [x.requires_grad for x in found] == [True, False, False]
    assert {x.dtype for x in found} == {torch.float32}


def test_16_bit_inputs_have_a_loss_of_32_bits():
    data = batch()
    data.student, data.teacher = (
        tuple(x.bfloat16() for x in pair) for pair in (data.student, data.teacher)
    )
    found, expected = (outcome(kind(), data, biases=False) for kind in (KIND, Distillation))
    assert found[0].dtype == torch.float32
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-2, atol=2e-3)


def test_the_function_has_the_arguments_of_the_class():
    data = batch(ignore_index=22)
    options = {"weight_hard_loss": 0.2, "weight_soft_loss": 0.7, "beta": 0.3, "ignore_index": 22}
    options |= {"temperature": 0.8, "compiled": False, "chunk_size": 4}
    expected = outcome(KIND(**options, return_soft_hard_loss=True), data)

    def applied(*given):
        return ours.LigerFusedLinearJSDFunction.apply(*given, *options.values(), True)

    close(outcome(applied, data), expected)


@pytest.mark.skipif(not INSTALLED, reason="needs liger-kernel itself")
def test_the_parameters_are_those_of_liger():
    own = INSTALLED.LigerFusedLinearJSDLoss
    assert_same_parameters(KIND, own, "__init__", "forward")
    function = INSTALLED.jsd_loss.LigerFusedLinearJSDFunction
    found = parameters(ours.LigerFusedLinearJSDFunction.apply)
    assert found == parameters(function.forward)[1:]  # without ctx
