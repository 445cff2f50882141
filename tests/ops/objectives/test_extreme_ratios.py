"""Log-ratios of +-200, all kinks, advantage 0: exact in every objective, and never NaN."""

import itertools

import pytest
import torch

from fastrl import Objective
from fastrl.contract import KL_ESTIMATORS, KL_GRADIENTS, SURROGATES
from tests.ops.policy_loss_cases import assert_exact, widest

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

RATIOS = (-200.0, -80.0, -20.0, -0.25, 0.0, 0.25, 20.0, 80.0, 200.0)
#: of 17, 30 and 39.9 the two parts of a bias-corrected slope are of size e^x, and cancel
DISTANCES = (-200.0, -80.0, -17.0, -0.25, 0.0, 0.25, 17.0, 30.0, 39.9, 80.0, 200.0)
ADVANTAGES = (-2.0, 0.0, 2.0)
#: log-ratio to the old policy, to the reference, advantage
GRID = torch.tensor(list(itertools.product(RATIOS, DISTANCES, ADVANTAGES)), dtype=torch.float64)

OBJECTIVES = [
    Objective(
        surrogate=surrogate,
        level=level,
        kl_coef=0.1,
        kl_estimator=estimator,
        kl_gradient=gradient,
        aggregation="token-sum",
        **({"dual_clip": 3.0, "delta": 4.0} if surrogate == "ppo_clip" else {}),
    )
    for surrogate in SURROGATES
    for level in (("sequence",) if surrogate == "gmpo" else ("token", "sequence", "sequence-token"))
    for estimator in KL_ESTIMATORS
    for gradient in KL_GRADIENTS
    if not (surrogate == "reinforce" and level != "token")
    if not (surrogate == "gmpo" and gradient == "bias-corrected")
]


def name_of(o):
    return f"{o.surrogate}-{o.level}-{o.kl_estimator}-{o.kl_gradient}"


def of_objectives():
    for o in OBJECTIVES:
        # the interpreter has one program for all tokens, but one for each sequence
        marks = [] if o.level == "token" else [pytest.mark.not_on("triton")]
        yield pytest.param(o, marks=marks, id=name_of(o))


@pytest.mark.parametrize("o", of_objectives())
def test_any_distance_is_exact(backend, o):
    """Also where the slope is 0 since everything is held at a bound."""
    for dtype in (widest(backend), torch.bfloat16, torch.float16):
        log_ratio, distance, advantages = GRID.to(dtype).T
        logprobs = torch.full((len(GRID), 1), -1.0, dtype=dtype)
        inputs = {
            "logprobs": logprobs,
            "old_logprobs": logprobs - log_ratio[:, None],
            "ref_logprobs": logprobs + distance[:, None],
            "advantages": advantages,
            "mask": torch.ones(len(GRID), 1),
        }
        result = assert_exact(backend, o, inputs)
        assert result.loss.isfinite()
        assert all(value.isfinite() for value in result.metrics.values())
