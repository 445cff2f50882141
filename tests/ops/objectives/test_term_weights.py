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


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("above", [0.0, 1e-9, 2e-8, 1e-6])
@pytest.mark.parametrize("rises", [True, False])
def test_a_log_probability_above_0_is_that_of_a_certain_token(backend, kind, above, rises):
    """Rounding of a softmax can give 2e-8: a token of probability 1 that came from 0.5, or left."""
    certain, half = torch.full((1, 2), above), torch.full((1, 2), math.log(0.5))
    logprobs, old = (certain, half) if rises else (half, certain)
    logprobs = logprobs.clone().requires_grad_()
    result = fastrl.policy_loss(
        logprobs,
        torch.tensor([1.0 if rises else -1.0]),
        torch.ones(1, 2),
        old_logprobs=old,
        objective=f"dppo_{kind}",
        backend=backend,
    )
    result.loss.backward()
    assert logprobs.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gamma_weights_have_the_dtype_of_the_loss(backend, default, dtype):
    """k and lambda have no short binary form; (w^k e^(lambda (1 - w))) by hand, with log w = 2."""
    if dtype == torch.float64:
        backend = "reference"
    gamma = fastrl.GammaWeights(k_pos=1.3, lambda_pos=0.1, k_neg=0.7, lambda_neg=0.3)
    old = torch.full((2, 4), -1.5, dtype=dtype)
    logprobs, usual = (old + 0.5).requires_grad_(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        loss = fastrl.policy_loss(
            logprobs,
            torch.tensor([1.0, -1.0], dtype=dtype),
            torch.ones(2, 4, dtype=dtype),
            old_logprobs=old,
            objective=Objective(
                surrogate="reinforce", gamma_weights=gamma, aggregation="token-sum"
            ),
            backend=backend,
        ).loss
        loss.backward()
    finally:
        torch.set_default_dtype(usual)
    wanted = [math.exp(k * 2 - decay * math.expm1(2)) for k, decay in ((1.3, 0.1), (0.7, 0.3))]
    came = (logprobs.grad[:, 0] * torch.tensor([-1, 1])).tolist()
    assert came == pytest.approx(wanted, rel=1e-6 if dtype == torch.float32 else 1e-14)
    assert loss.dtype == dtype


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
