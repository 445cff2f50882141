"""The weights of each term of the loss: policy weights, masks, corrections, normalizers."""

import math

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from tests.ops.inputs import POISONS, policy_inputs
from tests.ops.policy_loss_cases import assert_exact, needed, pack, run

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.not_on("triton"),
    pytest.mark.usefixtures("poisoned_memory"),
]

EVERYTHING = Objective(
    kl_coef=0.2,
    kl_gradient="bias-corrected",
    entropy_coef=0.1,
    level="sequence",
    off_policy_threshold=0.05,
    top_entropy_quantile=0.5,
    entropy_aggregation="token-mean",
    rollout_correction=(
        RolloutCorrection(kind="filter", level="geometric", low=0.7, high=1.3),
        RolloutCorrection(level="token", low=0.5, high=1.5),
    ),
    rollout_weighs="policy",
    aggregation="seq-mean-token-mean",
)
EVERY_FACTOR = Objective(
    entropy_coef=0.1,
    kl_coef=0.2,
    off_policy_threshold=0.05,
    rollout_correction=(RolloutCorrection(), RolloutCorrection(kind="mask", low=0.1)),
)


def widest(backend):
    return torch.float64 if backend == "reference" else torch.float32


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


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("objective", [EVERYTHING, EVERY_FACTOR], ids=["sequence", "token"])
def test_masked_tokens_are_inert_under_every_option(backend, objective, poison):
    clean = policy_inputs(4, 6, widest(backend), "random")
    dirty = {
        name: x if name == "mask" else torch.where(clean["mask"], x, poison)
        for name, x in clean.items()
    }
    use = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy", "policy_weights")
    outcomes = [run(backend, objective, inputs, use) for inputs in (clean, dirty)]
    for before, after in zip(*outcomes, strict=True):
        if isinstance(before, torch.Tensor):
            assert torch.equal(before, after)
        else:
            assert torch.equal(before.loss, after.loss)
            assert all(torch.equal(before.metrics[k], after.metrics[k]) for k in before.metrics)


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "rollout_logprobs", "policy_weights"])
def test_nan_in_an_active_token_reaches_loss_and_gradient(backend, name):
    inputs = policy_inputs(3, 4, widest(backend), "all")
    inputs["advantages"] = inputs["advantages"].abs()
    inputs[name][1, 2] = math.nan
    o = Objective(
        top_entropy_quantile=1.0,
        off_policy_threshold=0.1,
        rollout_correction=RolloutCorrection(kind="filter", low=0.01, high=100.0),
    )
    use = ("old_logprobs", "rollout_logprobs", "policy_weights")
    result, gradient, _ = run(backend, o, inputs, use)
    assert result.loss.isnan()
    assert gradient[1, 2].isnan()
    assert not gradient[0].isnan().any()


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


def test_a_normalizer_per_term(backend):
    inputs = policy_inputs(3, 4, widest(backend), "ragged")
    use = ("old_logprobs", "ref_logprobs", "entropy")
    fields = {"kl_coef": 0.2, "entropy_coef": 0.1, "aggregation": "seq-mean-token-mean"}
    own = Objective(**fields, kl_aggregation="token-mean", entropy_aggregation="token-mean")
    tokens = float(inputs["mask"].sum())
    sequences = float((inputs["mask"].sum(-1) > 0).sum())
    local, _, _ = run(backend, own, inputs, use)
    given, _, _ = run(
        backend,
        own,
        inputs,
        use,
        normalizer={"policy": sequences, "kl": tokens, "entropy": torch.tensor(tokens)},
    )
    assert given.loss.item() == pytest.approx(local.loss.item(), rel=1e-6)
    halved, _, _ = run(backend, own, inputs, use, normalizer={"kl": 2 * tokens})
    kl = own.kl_coef * local.metrics["kl"]
    assert (local.loss - halved.loss).item() == pytest.approx(kl.item() / 2, rel=1e-5)


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
