"""Packed sequences of 3, 5, 1 and 7 tokens: the same results as for each sequence separately."""

import math

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.objective.presets import PRESETS
from tests.ops.inputs import cu_seqlens

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LENGTHS = (3, 5, 1, 7)
N = sum(LENGTHS)
BOUNDS = cu_seqlens(LENGTHS)
WIDTH = 9.0  # a constant of dr_grpo, not the longest sequence

OBJECTIVES = {
    **{
        name: Objective.preset(name, **({"length_norm": WIDTH} if name == "dr_grpo" else {}))
        for name in PRESETS
    },
    "wide gspo": Objective.preset("gspo", clip_low=0.1, clip_high=0.2),
    "gspo-token": Objective(level="sequence-token", clip_low=0.1),
    "bias-corrected": Objective(level="sequence", kl_coef=0.3, kl_gradient="bias-corrected"),
    "everything": Objective(
        kl_coef=0.2,
        entropy_coef=0.1,
        off_policy_threshold=0.05,
        rollout_correction=(
            RolloutCorrection(level="sequence", low=0.5, high=2.0),
            RolloutCorrection(kind="filter", level="geometric", low=0.6, high=1.5),
            RolloutCorrection(kind="mask", low=0.2, high=3.0),
        ),
        rollout_weighs="policy",
        aggregation="seq-mean-token-mean",
        kl_aggregation="seq-mean-token-sum",
        entropy_aggregation="seq-mean-token-mean",
    ),
    "prompt-mean": Objective(aggregation="prompt-mean"),
}


def split(x):
    return [x[a:b] for a, b in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True)]


def inputs(real, *, broken=None):
    """Tokens [N]; the last of the first sequence is masked, and may be broken."""
    logprobs = -torch.rand(N, dtype=real) * 3 - 0.01
    given = {
        name: logprobs + 0.4 * torch.randn(N, dtype=real)
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    given["entropy"] = torch.rand(N, dtype=real)
    mask = torch.ones(N)
    mask[2] = 0
    if broken is not None:
        for x in (logprobs, *given.values()):
            x[2] = broken
    return logprobs, mask, given


def chosen(o, given):
    use = {"old_logprobs", "entropy"}
    use |= {"ref_logprobs"} if o.kl_coef else set()
    use |= {"rollout_logprobs"} if o.rollout_correction else set()
    return {name: x for name, x in given.items() if name in use}


def normalizer_of(o):
    """A global count, so that the loss of a batch is the sum of its parts."""
    own = {"kl": o.kl_aggregation, "entropy": o.entropy_aggregation}
    if any(own.values()):
        return {"policy": 4.0, **{name: 4.0 for name, aggregation in own.items() if aggregation}}
    return 16.0 if o.aggregation == "token-mean" else 4.0


def by_sequence(o, packed, options):
    """Loss, gradients and metrics of each sequence in a separate call, as [1, n]."""
    logprobs, A, mask, given = packed
    loss, gradients, metrics = 0, [], []
    for s, (lp, m) in enumerate(zip(split(logprobs), split(mask), strict=True)):
        leaf = lp.detach().clone().requires_grad_()
        part = {name: split(x)[s][None] for name, x in given.items()}
        groups = {"group_size": 1} if o.aggregation == "prompt-mean" else {}
        advantages = split(A)[s][None] if A.shape == (N,) else A[s : s + 1]
        result = fastrl.policy_loss(
            leaf[None], advantages, m[None], objective=o, **part, **groups, **options
        )
        result.loss.backward()
        loss = loss + result.loss.detach()
        gradients.append(leaf.grad)
        metrics.append(result.metrics)
    return loss, torch.cat(gradients), fastrl.reduce_metrics(metrics)


@pytest.mark.parametrize("by_token", [False, True], ids=["[S]", "[N]"])
@pytest.mark.parametrize("broken", [None, math.nan], ids=["clean", "broken"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_policy_loss(backend, name, broken, by_token):
    o = OBJECTIVES[name]
    real = torch.float64 if backend == "reference" else torch.float32
    logprobs, mask, given = inputs(real, broken=broken)
    given = chosen(o, given)
    A = torch.randn(N if by_token else 4, dtype=real)
    options = {"normalizer": normalizer_of(o), "backend": backend}
    loss, gradient, metrics = by_sequence(o, (logprobs, A, mask, given), options)
    leaf = logprobs.clone().requires_grad_()
    groups = {"group_ids": torch.arange(4)} if o.aggregation == "prompt-mean" else {}
    result = fastrl.policy_loss(
        leaf, A, mask, cu_seqlens=BOUNDS, objective=o, **given, **groups, **options
    )
    result.loss.backward()
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if real == torch.float64 else {}
    torch.testing.assert_close(leaf.grad, gradient, **tolerance)
    torch.testing.assert_close(result.loss.detach(), loss, **tolerance)
    torch.testing.assert_close(result.metrics, metrics, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["wide gspo", "gspo-token", "gmpo", "everything", "grpo"])
@pytest.mark.parametrize("form", ["logits", "linear"])
def test_from_logits_and_from_hidden_states(backend, form, name):
    o = OBJECTIVES[name]
    hidden, head = torch.randn(N, 6), torch.randn(19, 6)
    ids = torch.randint(19, (N,))
    _, mask, given = inputs(torch.float32)
    given = {k: x for k, x in chosen(o, given).items() if k != "entropy"}
    A = torch.randn(4)
    options = {"objective": o, "normalizer": normalizer_of(o), "backend": backend}

    def call(states, token_ids, *rest, **more):
        if form == "logits":
            return fastrl.logits_policy_loss(states @ head.t(), token_ids, *rest, **more, **options)
        return fastrl.linear_policy_loss(
            states, head, token_ids, *rest, chunk_tokens=4, **more, **options
        )

    whole = hidden.clone().requires_grad_()
    call(whole, ids, A, mask, cu_seqlens=BOUNDS, **given).loss.backward()
    gradients = []
    for s, part in enumerate(split(hidden)):
        leaf = part.clone().requires_grad_()
        more = {k: split(x)[s][None] for k, x in given.items()}
        call(
            leaf[None], split(ids)[s][None], A[s : s + 1], split(mask)[s][None], **more
        ).loss.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(whole.grad, torch.cat(gradients), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_and_returns(backend, lam):
    rewards, values = torch.randn(N), torch.randn(N)
    bootstrap = torch.randn(4)
    _, mask, _ = inputs(torch.float32)
    whole = fastrl.gae(
        rewards,
        values,
        mask,
        gamma=0.9,
        lam=lam,
        bootstrap_values=bootstrap,
        cu_seqlens=BOUNDS,
        backend=backend,
    )
    returns = fastrl.discounted_returns(rewards, mask, gamma=0.9, cu_seqlens=BOUNDS)
    for s, (r, v, m) in enumerate(zip(*map(split, (rewards, values, mask)), strict=True)):
        alone = fastrl.gae(
            r[None],
            v[None],
            m[None],
            gamma=0.9,
            lam=lam,
            bootstrap_values=bootstrap[s : s + 1],
            backend=backend,
        )
        assert torch.equal(split(whole.advantages)[s], alone.advantages[0])
        assert torch.equal(split(whole.returns)[s], alone.returns[0])
        own = fastrl.discounted_returns(r[None], m[None], gamma=0.9)
        assert torch.equal(split(returns)[s], own[0])


def padded(x, fill=0.0):
    result = x.new_full((4, max(LENGTHS)), fill)
    for row, part in zip(result, split(x), strict=True):
        row[: len(part)] = part
    return result


def test_batch_level_options_equal_those_of_a_padded_batch(backend):
    logprobs, mask, given = inputs(torch.float32)
    wide = padded(mask)
    valid = wide.bool()
    x = torch.randn(N)
    white = fastrl.whiten(x, mask)
    torch.testing.assert_close(white[mask.bool()], fastrl.whiten(padded(x, 1e30), wide)[valid])
    assert fastrl.masked_mean(x, mask) == pytest.approx(
        fastrl.masked_mean(padded(x, math.nan), wide).item()
    )
    o = Objective(top_entropy_quantile=0.5, entropy_coef=0.1, aggregation="seq-mean-token-mean")
    leaf = logprobs.clone().requires_grad_()
    packed = fastrl.policy_loss(
        leaf,
        torch.ones(4),
        mask,
        entropy=given["entropy"],
        cu_seqlens=BOUNDS,
        objective=o,
        backend=backend,
    )
    packed.loss.backward()
    other = padded(logprobs, math.nan).requires_grad_()
    result = fastrl.policy_loss(
        other,
        torch.ones(4),
        wide,
        entropy=padded(given["entropy"], 9.0),
        objective=o,
        backend=backend,
    )
    result.loss.backward()
    torch.testing.assert_close(padded(leaf.grad), other.grad)
    torch.testing.assert_close(packed.loss, result.loss)


def test_rewards_of_packed_sequences_are_grouped_by_sequence(backend):
    rewards = torch.tensor([1.0, 0.0, 3.0, 2.0])
    scores = fastrl.group_advantages(rewards, group_size=2, backend=backend).advantages
    logprobs, mask, _ = inputs(torch.float32)
    leaf = logprobs.requires_grad_()
    o = Objective(aggregation="token-sum")
    fastrl.policy_loss(
        leaf, scores, mask, cu_seqlens=BOUNDS, objective=o, backend=backend
    ).loss.backward()
    for gradient, m, score in zip(split(leaf.grad), split(mask), scores, strict=True):
        torch.testing.assert_close(gradient, -score * m)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_token_weights(aggregation):
    _, mask, _ = inputs(torch.float32)
    weights = fastrl.token_weights(mask, aggregation=aggregation, cu_seqlens=BOUNDS)
    wide = fastrl.token_weights(padded(mask), aggregation=aggregation)
    assert torch.equal(padded(weights), wide)
