"""The weights of each term of the loss: policy weights, masks, corrections, normalizers."""

import math

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.not_on("triton"),
    pytest.mark.usefixtures("poisoned_memory"),
]


def test_the_top_entropy_quantile_is_over_valid_tokens(backend):
    entropy = torch.tensor([[5.0, 1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]])
    logprobs = torch.zeros(2, 5, requires_grad=True)
    result = fastrl.policy_loss(
        logprobs,
        torch.ones(2),
        mask,
        entropy=entropy,
        objective=Objective(aggregation="token-sum", top_entropy_quantile=0.5),
        backend=backend,
    )
    result.loss.backward()
    # 1 2 3 4 5: the median and what is above
    assert (logprobs.grad != 0).tolist() == [
        [True, False, False, True, False],
        [True] + 4 * [False],
    ]


def test_off_policy_sequences_with_negative_advantage_are_dropped(backend):
    # mean log old / current: 0.3, 0.1, 0.3; advantages -1, -1, 1: only the first is dropped
    drift = torch.tensor([[0.2, 0.4], [0.0, 0.2], [0.3, 0.3]])
    logprobs = torch.full((3, 2), -1.0, requires_grad=True)
    result = fastrl.policy_loss(
        logprobs,
        torch.tensor([-1.0, -1.0, 1.0]),
        torch.ones(3, 2),
        old_logprobs=logprobs.detach() + drift,
        objective=Objective(off_policy_threshold=0.2, clip_low=1.0),
        backend=backend,
    )
    result.loss.backward()
    assert (logprobs.grad != 0).tolist() == [[False] * 2, [True] * 2, [True] * 2]


def test_a_token_that_the_engine_could_not_score_counts_as_no_difference(backend):
    # TRL's get_off_policy_mask: nan_to_num of the differences; their means are 0.3, 0.1
    drift = torch.tensor([[math.nan, 0.6], [math.nan, 0.2]])
    logprobs = torch.full((2, 2), -1.0, requires_grad=True)
    result = fastrl.policy_loss(
        logprobs,
        torch.tensor([-1.0, -1.0]),
        torch.ones(2, 2),
        rollout_logprobs=logprobs.detach() + drift,
        objective=Objective(off_policy_threshold=0.2),
        backend=backend,
    )
    result.loss.backward()
    assert (logprobs.grad != 0).tolist() == [[False] * 2, [True] * 2]


# --- importance weights against the rollout engine: by hand, detached, within bounds


def weights_of(backend, differences, **correction):
    """is_t of tokens with these log(old / rollout): minus the gradient at advantage 1."""
    old = torch.full_like(differences, -1.0)
    logprobs = old.clone().requires_grad_()
    result = fastrl.policy_loss(
        logprobs,
        torch.ones_like(old),
        torch.ones_like(old),
        old_logprobs=old,
        rollout_logprobs=old - differences,
        objective=Objective(
            aggregation="token-sum", rollout_correction=RolloutCorrection(**correction)
        ),
        backend=backend,
    )
    result.loss.backward()
    return -logprobs.grad


# log ratios ln 1, ln 4, ln 1/4, ln 2; product over the sequence 2, geometric mean 2^(1/4) = 1.1892
DIFFERENCES = torch.tensor([[1.0, 4.0, 0.25, 2.0]]).log()
MEAN = 2**0.25
BY_HAND = [
    ("truncate", "token", 0.5, 2.5, [1, 2.5, 0.5, 2]),
    ("mask", "token", 0.5, 2.5, [1, 0, 0, 2]),
    ("truncate", "sequence", 0.5, 2.5, [2, 2, 2, 2]),
    ("truncate", "sequence", 0.5, 1.5, [1.5] * 4),
    ("mask", "sequence", 0.5, 2.5, [2, 2, 2, 2]),
    ("mask", "sequence", 0.5, 1.5, [0] * 4),
    ("truncate", "geometric", 0.5, 2.5, [MEAN] * 4),
    ("truncate", "geometric", 1.25, 2.5, [1.25] * 4),
    ("mask", "geometric", 0.5, 2.5, [MEAN] * 4),
    ("mask", "geometric", 1.25, 2.5, [0] * 4),
]


@pytest.mark.parametrize(("kind", "level", "low", "high", "expected"), BY_HAND)
def test_weights_by_hand(backend, kind, level, low, high, expected):
    weights = weights_of(backend, DIFFERENCES, kind=kind, level=level, low=low, high=high)
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-6)
