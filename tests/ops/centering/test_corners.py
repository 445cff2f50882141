"""Score centering at the edges: numbers that are broken, tokens without a weight of their own."""

import pytest
import torch

from fastrl import Objective, RolloutCorrection, TopKLogprobs, logits_policy_loss

pytestmark = pytest.mark.kernels
V = 9


@pytest.mark.parametrize("kind", ["truncate", "mask", "filter"])
def test_a_nan_of_the_sampler_is_not_a_weight_of_0(backend, kind):
    correction = RolloutCorrection(kind=kind, low=0.5, high=2.0)
    objective = Objective.preset("reinforce", score_centering=True, rollout_correction=correction)
    logits, ids = torch.randn(1, V), torch.tensor([5])
    top = TopKLogprobs(torch.tensor([[5, 2]]), torch.tensor([[-1.0, torch.nan]]))
    result = logits_policy_loss(
        logits, ids, torch.ones(1), torch.ones(1), objective=objective,
        rollout_logprobs=torch.tensor([-1.0]), rollout_top_k=top, backend=backend,
    )  # fmt: skip
    assert result.loss.isnan()


def test_the_term_is_part_of_the_policy_loss_and_moves_tokens(backend):
    """Also where the weight of the sampled token is 0."""
    logits, ids = torch.tensor([[2.0, 0.0, 0.0, -1.0]]), torch.tensor([3])
    top = TopKLogprobs(torch.tensor([[0, 1]]), torch.tensor([[0.6, 0.3]]).log())
    correction = RolloutCorrection(kind="mask", low=0.5, high=2.0)
    result = logits_policy_loss(
        logits, ids, torch.ones(1), torch.ones(1), rollout_top_k=top, backend=backend,
        rollout_logprobs=torch.tensor([0.0]),
        objective=Objective.preset(
            "reinforce", score_centering=True, rollout_correction=correction
        ),
    )  # fmt: skip
    assert result.metrics["zero_weight_fraction"] == 1
    assert result.metrics["zero_grad_fraction"] == 0
    assert result.loss != 0
    assert result.metrics["policy_loss"] == result.loss
