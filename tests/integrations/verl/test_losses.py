"""verl's policy losses, value loss, aggregation and KL on fastrl, against its formulas and verl."""

import pytest
import torch

from tests.integrations.compared import close, outcome
from tests.integrations.verl.cases import (
    COUNTS,
    LOSSES,
    MODES,
    OURS,
    TRANSCRIBED,
    batch,
    policy_loss,
    transcribed,
)

#: name -> mask and dtype, counts, whether with rollout weights; float32 takes the kernels
BATCHES = {
    "plain": ("bools", torch.float32, "local", False),
    "global counts": ("bools", torch.float64, "global", False),
    "weights": ("integers", torch.float32, "global", True),
    "fractions": ("fractions", torch.float64, "global", True),
    "fractions in float32": ("fractions", torch.float32, "local", False),
    "twos": ("twos", torch.float64, "local", True),
}
BATCH = pytest.mark.parametrize("given", BATCHES.values(), ids=BATCHES)
#: a loss mode and its options
EXTREMES = [
    *LOSSES.items(),
    ("vanilla", {"clip_ratio_low": 10.0}),  # a lower bound below 0
    ("cispo", {"clip_ratio_low": 10.0}),
    ("dppo_tv", {"clip_ratio": 0.15}),
    ("dppo_kl", {"clip_ratio": 9.0}),  # the ratio is at most 20 by default
    # all tokens are drawn, one, or none
    ("clip_cov", {"policy_loss": {**LOSSES["clip_cov"]["policy_loss"], "clip_cov_ratio": 1.0}}),
    ("clip_cov", {"policy_loss": {**LOSSES["clip_cov"]["policy_loss"], "clip_cov_ratio": 1e-4}}),
    ("clip_cov", {"policy_loss": {**LOSSES["clip_cov"]["policy_loss"], "clip_cov_lb": 99.0}}),
    ("kl_cov", {"policy_loss": {"kl_cov_ratio": 1e-4, "ppo_kl_coef": 0.3}}),
    ("kl_cov", {"policy_loss": {"kl_cov_ratio": 1.0, "ppo_kl_coef": 0.3}}),
]


def same_policy_loss(name, theirs, data, mode="token-mean", weights=None, counts="local", **fields):
    config = theirs.config(global_batch_info=COUNTS[counts], **fields)
    a, b = (policy_loss(n, name, data, config, mode, weights) for n in (OURS, theirs))
    assert all(type(value) is float for value in a[1].values())
    close(a, b, 1e-7 if data.log_prob.dtype == torch.float64 else 1e-5)


@BATCH
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(theirs, name, mode, given):
    kind, dtype, counts, weighed = given
    data = batch(kind, dtype, seed=1)
    weights = data.weights if weighed else None
    same_policy_loss(name, theirs, data, mode, weights, counts, **LOSSES[name])


@pytest.mark.parametrize("kind", ["bools", "fractions"])
@pytest.mark.parametrize(("name", "fields"), EXTREMES)
def test_policy_losses_far_from_the_old_policy(theirs, name, fields, kind):
    data = batch(kind, torch.float64, seed=2, spread=2.0)
    data.old[0] = data.log_prob[0] - 15.0  # above gspo's bound of 10
    data.log_prob[2] = data.old[2] - 25.0  # below the bound of -20
    data.log_prob[3, 0] = data.old[3, 0] - 25.0
    data.advantages[0] = -data.advantages[0].abs()
    data.advantages[:, ::3] = 0.0
    same_policy_loss(name, theirs, data, **fields)


@pytest.mark.parametrize("kind", ["bools", "fractions"])
@pytest.mark.parametrize("name", LOSSES)
def test_no_log_ratio_makes_a_loss_infinite(name, kind):
    data = batch(kind)
    data.old[:, ::2] -= 400.0
    data.log_prob[:, 3] -= 300.0
    for sign in (1, -1):
        data.advantages = sign * data.advantages.abs()
        config = transcribed(global_batch_info={}, **LOSSES[name])
        loss, _, gradient = policy_loss(OURS, name, data, config)
        assert loss.isfinite()
        assert gradient.isfinite().all()


def test_clip_cov_draws_by_the_ratio_in_the_dtype_of_its_inputs():
    """All tokens that are not clipped are drawn; in float32 they would be others."""
    options = {"clip_cov_ratio": 1.0, "clip_cov_lb": -99.0, "clip_cov_ub": 99.0}
    config = TRANSCRIBED.config(global_batch_info={}, clip_ratio=0.2, policy_loss=options)
    data, shares = batch(dtype=torch.bfloat16, B=20, T=20), []
    _, metrics, _ = policy_loss(OURS, "clip_cov", data, config)
    for dtype in (torch.bfloat16, torch.float32):
        new, old, scores = (x.to(dtype) for x in (data.log_prob, data.old, data.advantages))
        ratio = (new - old).exp()
        drawn = data.mask.bool() & (ratio.clamp(0.8, 1.2) * scores >= ratio * scores)
        shares.append(pytest.approx((drawn.sum() / data.mask.sum()).item()))
    assert metrics["actor/pg_clipfrac"] == shares[0] != shares[1]


@pytest.mark.parametrize("above", [2e-8, 1e-6])
@pytest.mark.parametrize("other", [-0.7, -1e-4])  # which is dropped, and which is not
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_log_probability_above_0_is_that_of_a_certain_token(name, other, above):
    """Of both signs of the advantage, and of a token that becomes certain, or was."""
    data = batch(dtype=torch.float64)
    config = TRANSCRIBED.config(global_batch_info={}, **LOSSES[name])
    new, old = torch.rand(2, *data.mask.shape) < 0.5

    def result(most):
        data.log_prob, data.old = (torch.where(x, most, other).double() for x in (new, old))
        return policy_loss(OURS, name, data, config)

    close(result(above), result(0.0), 1e-5)


@BATCH
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["agg_loss", "compute_value_loss"])
def test_aggregation_and_value_loss(theirs, name, mode, given):
    kind, dtype, counts, _ = given
    data = batch(kind, dtype)
    old = data.values + torch.randn(6, 9)
    if theirs is TRANSCRIBED:  # at the bounds, where verl's `max` of a tensor halves the gradient
        old[0, :4], data.values[0, :4] = 0.0, torch.tensor([0.5, -0.5, 0.0, 2.0])

    def run(namespace):
        function, counted = getattr(namespace, name), COUNTS[counts]
        if name == "agg_loss":
            return outcome(lambda x: function(x, data.mask, mode, **counted), data.values)
        rest = (data.rewards, old, data.mask, 0.5, mode)
        return outcome(lambda x: function(x, *rest, **counted), data.values)

    close(run(OURS), run(theirs))


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_kl_penalty(theirs, kind, plus):
    data = batch(spread=1.5)
    data.log_prob[0, :4] = data.old[0, :4] + torch.tensor([100.0, -90.0, 9.0, -2.6])
    a, b = (
        outcome(lambda x, n=n: n.kl_penalty(x, data.old, kind + plus), data.log_prob)
        for n in (OURS, theirs)
    )
    close(a, b)


@pytest.mark.parametrize("kind", ["full", "full+"])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_full_kl_penalty(dtype, normalized, kind):
    """Of log-probabilities or logits of the whole vocabulary; verl raises."""
    torch.manual_seed(0)
    policy, reference = (2 * torch.randn(3, 4, 19).to(dtype) for _ in range(2))
    if normalized:
        policy, reference = policy.log_softmax(-1), reference.log_softmax(-1)
    reference.requires_grad_()

    def exact(x):
        log_q, log_p = x.double().log_softmax(-1), reference.detach().double().log_softmax(-1)
        return (log_q.exp() * (log_q - log_p)).sum(-1)

    a, b = outcome(lambda x: OURS.kl_penalty(x, reference, kind), policy), outcome(exact, policy)
    assert (a[0].shape, a[0].dtype) == ((3, 4), torch.float32)
    assert reference.grad is None
    close(a[0], b[0])
    close(a[1], b[1], 1e-5 if dtype == torch.float32 else 1e-2)


def test_the_loss_may_be_changed_in_place():
    data, config = batch(), transcribed(global_batch_info={})
    log_prob = data.log_prob.requires_grad_()
    loss, _ = OURS.compute_policy_loss_vanilla(
        data.old, log_prob, data.advantages, data.mask, config=config
    )
    loss -= 0.1 * (log_prob * 2).sum()  # as verl's ppo_loss adds its entropy
    loss.backward()
    assert log_prob.grad.abs().sum() > 0
