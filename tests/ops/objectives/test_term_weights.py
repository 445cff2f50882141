"""The weights of each term of the loss: policy weights, masks, corrections, normalizers."""

import itertools
import math

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from tests.ops.inputs import policy_inputs
from tests.ops.policy_loss_cases import assert_exact, needed, pack, run, widest

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.not_on("triton"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence-token"])
def test_policy_weights_only_affect_the_policy_term(backend, level, packing):
    inputs, lengths = policy_inputs(4, 6, widest(backend), "random"), None
    if packing:
        lengths = [3, 6, 1, 5]
        inputs = pack(inputs, lengths)
    o = Objective(level=level, kl_coef=0.3, entropy_coef=0.1)
    assert_exact(backend, o, inputs, (*needed(o), "policy_weights"), lengths)


def test_policy_weights_per_sequence_and_per_token_are_the_same(backend):
    inputs = policy_inputs(4, 6, widest(backend), "random")
    by_sequence = torch.rand(4, dtype=widest(backend))
    gradients = [
        run(backend, "grpo", inputs, policy_weights=factors)[1]
        for factors in (by_sequence, by_sequence[:, None].expand(4, 6))
    ]
    assert torch.equal(*gradients)
    assert not torch.equal(gradients[0], run(backend, "grpo", inputs)[1])


def test_a_normalizer_per_term(backend):
    inputs = policy_inputs(3, 4, widest(backend), "ragged")
    fields = {"kl_coef": 0.2, "entropy_coef": 0.1, "aggregation": "seq-mean-token-mean"}
    o = Objective(**fields, kl_aggregation="token-mean", entropy_aggregation="token-mean")
    for given in ({"policy": 2.0, "kl": 7.0, "entropy": torch.tensor(9.0)}, {"kl": 7.0}):
        assert_exact(backend, o, inputs, normalizer=given)


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


FORMS = [
    {"off_policy_threshold": -0.1},
    {"top_entropy_quantile": 0.5, "kl_coef": 0.1},
    {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "entropy_aggregation": "token-mean"},
    {
        "entropy_coef": 0.1,
        "entropy_aggregation": "token-sum",
        "kl_coef": 0.2,
        "kl_aggregation": "seq-mean-token-sum",
    },
    {"level": "sequence-token", "clip_low": 0.05},
    {"kl_coef": 0.2, "kl_gradient": "bias-corrected", "kl_aggregation": "token-sum"},
    {"kl_coef": 0.2, "kl_gradient": "straight-through"},
    {"log_ratio_clamp": (-0.1, 0.2), "entropy_coef": 0.1},
    {"rollout_correction": RolloutCorrection(), "rollout_weighs": "policy", "kl_coef": 0.1},
    {"rollout_correction": RolloutCorrection(level="sequence"), "off_policy_threshold": 0.0},
]


@pytest.mark.parametrize("on_policy", [False, True], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("options", FORMS, ids=lambda o: ",".join(o))
def test_the_three_forms_agree(backend, options, on_policy):
    B, T, H, V = 3, 5, 4, 23
    hidden = torch.randn(B, T, H, requires_grad=True)
    head = torch.randn(V, H, requires_grad=True)
    logits = (hidden @ head.t()).detach().requires_grad_()
    ids = torch.randint(V, (B, T))
    mask = torch.rand(B, T) < 0.8
    stats = fastrl.token_stats(logits, ids, mask=mask, backend=backend)

    def noise():
        return (stats.logprobs + 0.3 * torch.randn(B, T)).detach()

    o = Objective(**options)
    given = {"objective": o, "policy_weights": torch.rand(B, T), "backend": backend}
    given["old_logprobs"] = None if on_policy else noise()
    given["ref_logprobs"] = noise() if o.kl_coef else None
    given["rollout_logprobs"] = noise() if "rollout_correction" in options else None
    A = torch.randn(B)
    plain = fastrl.policy_loss(stats.logprobs, A, mask, entropy=stats.entropy, **given)
    plain.loss.backward()
    expected, logits.grad = logits.grad, None
    fused = fastrl.logits_policy_loss(logits, ids, A, mask, **given)
    fused.loss.backward()
    torch.testing.assert_close(logits.grad, expected, rtol=1e-4, atol=1e-6)
    for chunk in (2, 100):
        hidden.grad = None
        linear = fastrl.linear_policy_loss(hidden, head, ids, A, mask, chunk_tokens=chunk, **given)
        linear.loss.backward()
        torch.testing.assert_close(hidden.grad, expected @ head.detach(), rtol=1e-4, atol=1e-5)
        for other in (fused, linear):
            torch.testing.assert_close(other.loss, plain.loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(other.metrics, plain.metrics, rtol=1e-4, atol=1e-5)


# --- importance weights against the rollout engine: by hand, detached, within bounds

KINDS = ("truncate", "mask")
LEVELS = ("token", "sequence", "geometric")


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_the_current_logprobs_are_compared_with_the_rollout(backend, kind, level):
    # the rollout engine sampled, the trainer is on policy: old_logprobs=None means logprobs
    o = Objective(rollout_correction=RolloutCorrection(kind=kind, level=level, low=0.6, high=1.4))
    inputs = policy_inputs(4, 5, widest(backend), "random")
    assert_exact(backend, o, inputs, use=("rollout_logprobs",))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("difference", [200.0, -200.0, math.inf, -math.inf])
def test_far_apart_engines_give_no_nan(backend, kind, level, difference):
    differences = torch.tensor([[0.0, difference, 0.1]])
    weights = weights_of(backend, differences, kind=kind, level=level, low=0.5, high=2.0)
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert (weights <= 2).all()
    if kind == "mask":
        assert weights[0, 1] == 0


def test_equal_engines_change_nothing(backend):
    inputs = policy_inputs(3, 5, torch.float32)
    inputs["rollout_logprobs"] = inputs["old_logprobs"]
    bounds = ((1.0, 2.0), (0.5, 1.0))  # a bound is within the bounds
    for level, kind, (low, high) in itertools.product(LEVELS, KINDS, bounds):
        correction = RolloutCorrection(kind=kind, level=level, low=low, high=high)
        o = Objective(rollout_correction=correction)
        plain, gradient, _ = run(backend, Objective(), inputs)
        result, same, _ = run(backend, o, inputs, ("old_logprobs", "rollout_logprobs"))
        assert torch.equal(result.loss, plain.loss)
        assert torch.equal(gradient, same)
