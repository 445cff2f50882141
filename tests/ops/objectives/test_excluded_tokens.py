"""Tokens whose log-probability is -inf: banned from the vocabulary, but sampled.

The difference of two equal infinite log-probabilities is 0. An infinite log-probability is a
constant without gradient.
"""

import dataclasses
import math

import pytest
import torch

import fastrl
from fastrl import RolloutCorrection

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

INF = math.inf


@pytest.mark.parametrize("preset", ["cispo", "reinforce"])
def test_a_loss_that_multiplies_the_logprob_is_infinite_unless_the_advantage_is_zero(
    backend, preset
):
    for advantage, loss in ((1.0, INF), (-1.0, -INF), (0.0, 0.0)):
        logprobs = torch.tensor([[-INF, -1.0, -0.5]], requires_grad=True)
        given = {"old_logprobs": torch.tensor([[-INF, -1.125, -0.375]]), "objective": preset}
        A, mask = torch.tensor([advantage]), torch.ones(1, 3)
        result = fastrl.policy_loss(logprobs, A, mask, **given, backend=backend)
        result.loss.backward()
        assert result.loss == loss
        assert logprobs.grad[0, 0] == 0
        assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("objective", ["cispo", "reinforce"])
@pytest.mark.parametrize("drop", ["weight", "rollout", "off policy"])
def test_a_banned_token_that_is_dropped_costs_nothing(backend, objective, drop):
    logprobs = torch.tensor([[-1.0, -2.0], [-INF, -1.0]], requires_grad=True)
    o, options = fastrl.Objective.preset(objective), {}
    if drop == "weight":
        options = {"policy_weights": torch.tensor([[1.0, 1.0], [0.0, 0.0]])}
    elif drop == "rollout":
        correction = RolloutCorrection(kind="mask", low=0.5, high=2.0)
        o = dataclasses.replace(o, rollout_correction=correction)
        options = {
            "old_logprobs": torch.tensor([[-1.0, -2.0], [-9.0, -9.0]]),
            "rollout_logprobs": torch.tensor([[-1.0, -2.0], [-1.0, -1.0]]),
        }
    else:
        o = dataclasses.replace(o, off_policy_threshold=0.5)
        options = {"rollout_logprobs": torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])}
    advantages = torch.tensor([1.0, -1.0])
    mask = torch.ones(2, 2)
    result = fastrl.policy_loss(logprobs, advantages, mask, objective=o, **options, backend=backend)
    result.loss.backward()
    assert result.loss == 0.75  # of the first sequence: 3 / 4
    assert logprobs.grad.tolist() == [[-0.25, -0.25], [0.0, 0.0]]
