"""Score centering at the edges: no tokens, weights that are 1 everywhere, weights per sequence."""

from math import log

import pytest
import torch

from fastrl import Objective, RolloutCorrection, TopKLogprobs, logits_policy_loss

pytestmark = pytest.mark.kernels
B, T, V, K = 2, 3, 9, 4


def loss_of(objective, backend, shape=(B, T), **options):
    random = torch.Generator().manual_seed(0)
    logits, q = (torch.randn(*shape, V, generator=random) for _ in range(2))
    top = TopKLogprobs(*reversed(q.log_softmax(-1).topk(K)))
    ids, advantages = torch.full(shape, 5), torch.randn(shape, generator=random)
    if "old_logprobs" in options:
        options["old_logprobs"] = q.log_softmax(-1)[..., 5]
    logits.requires_grad_()
    mask = torch.ones(shape)
    options |= {"objective": objective, "rollout_top_k": top, "backend": backend}
    result = logits_policy_loss(logits, ids, advantages, mask, **options)
    result.loss.backward()
    return result, logits.grad


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_tokens(backend, shape):
    result, gradient = loss_of(Objective.preset("reinforce", score_centering=True), backend, shape)
    assert result.loss == result.metrics["centering_mass"] == 0
    assert gradient.shape == (*shape, V)


def centered_cispo(backend, **fields):
    objective = Objective.preset("cispo", score_centering=True, **fields)
    return loss_of(objective, backend, old_logprobs=True)[1]


def test_cispo_whose_clip_leaves_no_room_has_no_weight(backend):
    plain = Objective.preset("reinforce", score_centering=True, aggregation="token-mean")
    found = centered_cispo(backend, clip_low=0.0, clip_high=0.0, aggregation="token-mean")
    torch.testing.assert_close(found, loss_of(plain, backend)[1])


def test_the_bound_of_the_log_ratio_bounds_the_weight_of_cispo(backend):
    wide = {"clip_low": 1.0, "clip_high": 9.0}
    by_log = centered_cispo(backend, log_ratio_clamp=log(1.25), **wide)
    torch.testing.assert_close(by_log, centered_cispo(backend, clip_low=0.2, clip_high=0.25))
    assert not torch.allclose(by_log, centered_cispo(backend, **wide), atol=1e-3)
    far = centered_cispo(backend, log_ratio_clamp=1000.0, **wide)  # whose exp overflows
    torch.testing.assert_close(far, centered_cispo(backend, **wide))


def test_policy_weights_of_sequences_are_counted_like_those_of_tokens(backend):
    objective, weights = Objective.preset("grpo", score_centering=True), torch.tensor([0.0, 1.0])
    for given in (weights, weights[:, None].expand(B, T).contiguous()):
        result, _ = loss_of(objective, backend, policy_weights=given)
        assert result.metrics["zero_weight_fraction"] == 0.5


def test_the_metrics_of_the_head(backend):
    """head_kl is the KL of q from p over the K tokens and all others as one event."""
    random = torch.Generator().manual_seed(3)
    logits, q = (torch.randn(B, T, V, generator=random) for _ in range(2))
    top = TopKLogprobs(*reversed(q.log_softmax(-1).topk(K)))
    objective = Objective.preset("reinforce", score_centering=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    result = logits_policy_loss(
        logits, top.token_ids[..., 0], torch.ones(B), mask,
        objective=objective, rollout_top_k=top, backend=backend,
    )  # fmt: skip
    events = []
    for probs in (q.double().softmax(-1), logits.double().softmax(-1)):
        head = probs.gather(-1, top.token_ids)
        events.append(torch.cat([head, 1 - head.sum(-1, keepdim=True)], -1))
    of_q, of_p = (x[mask.bool()] for x in events)
    wanted = {
        "centering_mass": of_q[:, :-1].sum(-1).mean(),
        "head_kl": (of_q * (of_q / of_p).log()).sum(-1).mean(),
        "zero_weight_fraction": torch.tensor(0.0),
    }
    for name, value in wanted.items():
        assert result.metrics[name] == pytest.approx(value.item(), rel=1e-5), name


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
