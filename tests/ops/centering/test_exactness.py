"""Where score centering is exact or has no effect, rows with hardly a tail, and expectations."""

import dataclasses
import math

import pytest
import torch

import fastrl
from fastrl import KeptTokens, Teacher, TopKLogprobs
from tests.ops.centering.centered_losses import (
    WEIGHTS,
    B,
    K,
    T,
    V,
    centered,
    drawn,
    factors,
    without,
)
from tests.ops.linear.tensor_cores import multiply_as_on_a_gpu

pytestmark = pytest.mark.kernels


def outcome(logits, backend, **given):
    """A loss of logits, its metrics and the gradient."""
    leaf = logits.clone().requires_grad_()
    result = fastrl.logits_policy_loss(leaf, **given, backend=backend)
    result.loss.backward()
    return {"loss": result.loss.detach(), "d": leaf.grad, **result.metrics}


def with_terms_of_a_teacher(logits, given, top, teacher):
    """The gradient of the logits in float64: of the loss without its teacher, and the divergence's.

    Losses without a teacher are compared with the oracle.
    """
    o, leaf = given["objective"], logits.double().requires_grad_()
    coefficient = o.kl_coef if o.has_exact_kl else o.teacher_coef
    alone = {"teacher_coef": 0.0} | ({"kl_coef": None} if o.has_exact_kl else {})
    plain = dataclasses.replace(o, **alone, kl_estimator="k3")
    call = {**given, "objective": plain, "rollout_top_k": top, "backend": "reference"}
    loss = fastrl.logits_policy_loss(leaf, **call).loss
    if teacher is not None:
        names = given.keys() & {"token_ids", "mask", "kept", "temperature"}
        call = {name: given[name] for name in names} | {"outputs": ("divergence",)}
        stats = fastrl.token_stats(leaf, **call, teacher=teacher, backend="reference")
        weights = fastrl.token_weights(given["mask"], aggregation=o.aggregation)
        loss = loss + coefficient * (weights * stats.divergence).sum()
    loss.backward()
    return leaf.grad


def teacher_of(kind):
    logits = torch.randn(B, T, V)
    if kind == "tokens":
        values, ids = logits.log_softmax(-1).topk(3)
        return Teacher.from_top_k(ids, values, beta=0.5)
    if kind == "hidden":
        return Teacher.from_hidden(logits, torch.eye(V), beta=0.3)
    return Teacher.from_logits(logits, beta=0.3 if kind == "logits" else 1.0)


@pytest.mark.parametrize("kept_count", [None, 1, 12])
@pytest.mark.parametrize("kind", ["hidden", "logits", "exact KL", "tokens"])
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_beside_a_teacher(backend, form, kind, kept_count):
    """Also over sets that lack tokens of the sampler; every third row has no set."""
    if kind == "tokens" and kept_count is not None:
        pytest.skip("log-probabilities of some tokens are refused beside sets")
    o = centered("reinforce", *WEIGHTS["truncated"], teacher_coef=0.5)
    if kind == "exact KL":
        o = centered("reinforce", kl_estimator="exact", kl_coef=0.5)
    logits, given, top, _ = drawn(o)
    given |= {"temperature": 0.8}
    if kept_count is not None:
        sets = [torch.randperm(V)[:kept_count].tolist() if n % 3 else [] for n in range(B * T)]
        given["kept"] = KeptTokens.from_lists(sets)
    teacher, leaf = teacher_of(kind), logits.clone().requires_grad_()
    head = [torch.eye(V)] * (form == "hidden")  # d hidden = d logits
    call = {**given, "teacher": teacher, "rollout_top_k": top, "backend": backend}
    function = fastrl.linear_policy_loss if head else fastrl.logits_policy_loss
    function(leaf, *head, **call).loss.backward()
    exact = with_terms_of_a_teacher(logits, given, top, teacher)
    assert (leaf.grad - exact).abs().max() <= 2e-5 * exact.abs().max()


#: The weight of a token with the ratio r = p / q.
WEIGHED = {
    "none": torch.ones_like,
    "truncated": lambda r: r.clamp(0.7, 1.3),
    "unbounded": lambda r: r,
    "masked": lambda r: r * ((r >= 0.7) & (r <= 1.3)),
    "filtered": lambda r: ((r >= 0.7) & (r <= 1.3)).double(),
}


@pytest.mark.parametrize("kind", [*WEIGHTS])
def test_the_whole_vocabulary_gives_the_expectation(backend, kind):
    o = centered("reinforce", *WEIGHTS[kind])
    logits, given, _, _ = drawn(o)
    log_q = (logits.double() + torch.randn(B, T, V)).log_softmax(-1)
    ids = torch.rand(B, T, V).argsort(-1)
    top = TopKLogprobs(ids, log_q.gather(-1, ids))
    given["rollout_logprobs"] = log_q.gather(-1, given["token_ids"][..., None])[..., 0].float()
    if not o.rollout_corrections:
        del given["rollout_logprobs"]
    found = outcome(logits, backend, **given, rollout_top_k=top)["d"]
    plain = outcome(logits, backend, **given | {"objective": without(o)})["d"]
    leaf = logits.double().requires_grad_()
    log_p = leaf.log_softmax(-1)
    expected = (log_q.exp() * WEIGHED[kind]((log_p.detach() - log_q).exp()) * log_p).sum(-1)
    (factors(given, o) * expected).sum().backward()
    exact = plain.double() + leaf.grad
    assert (found - exact).abs().max() <= 5e-7 * max(exact.abs().max(), leaf.grad.abs().max())


@pytest.mark.parametrize("count", [1, K, V])
def test_weights_without_bounds_change_nothing(backend, count):
    """C is 0 to the last bit, and a gradient the rounding of p (1 - sum p - tail)."""
    o = centered("reinforce", *WEIGHTS["unbounded"])
    logits, given, top, _ = drawn(o, count=count)
    found = outcome(logits, backend, **given, rollout_top_k=top)
    wanted = outcome(logits, backend, **given | {"objective": without(o)})
    assert found["loss"] == wanted["loss"]
    assert found["policy_loss"] == wanted["policy_loss"]
    assert (found["d"] - wanted["d"]).abs().max() <= 4e-7 * wanted["d"].abs().max()


def test_rows_without_tokens_are_as_without_centering(backend):
    o = centered("ppo")
    logits, given, top, _ = drawn(o)
    absent = torch.zeros(B, T, dtype=torch.bool)
    absent[0] = absent[2, 1] = True
    top.token_ids[absent] = -1
    top.logprobs[absent] = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, 5.0])
    found = outcome(logits, backend, **given, rollout_top_k=top)
    plain = outcome(logits, backend, **given | {"objective": without(o)})
    assert (found["d"] - plain["d"])[absent].abs().max() <= 2e-7 * plain["d"].abs().max()
    assert (found["d"] - plain["d"])[~absent & given["mask"]].abs().amax(-1).min() > 1e-5
    top.token_ids.fill_(-1)
    every = outcome(logits, backend, **given, rollout_top_k=top)
    assert every["centering_mass"] == every["head_kl"] == 0
    torch.testing.assert_close(every["loss"], plain["loss"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("beside", ["alone", "a teacher", "a teacher's tokens"])
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_rows_with_hardly_a_tail(backend, form, beside, dtype, monkeypatch):
    """The policy's tail is 1e-3, the sampler's 0.3: alpha is 300.

    On GPUs, chunks of half precision are overwritten with their gradient in bfloat16.

    1 - sum p has an error of 8 roundings of 1, which is relative to 1e-3 in alpha, and so in the
    gradient of a token of the tail. Beside a teacher slopes of 300 cancel in float32.
    """
    rows, tail, narrowed = 8, 1e-3, dtype
    logits = torch.randn(1, rows, V)
    logits[..., 0] = logits[..., 1:].logsumexp(-1) + math.log((1 - tail) / tail)
    logits = logits.to(dtype)
    ids = torch.stack([torch.zeros(rows), torch.arange(3, rows + 3)], -1).long()[None]
    top = TopKLogprobs(ids, torch.tensor([0.5, 0.2]).log().expand(1, rows, 2))
    o = centered("reinforce", teacher_coef=float(beside != "alone"))
    given = {"token_ids": torch.arange(rows)[None] % 5, "advantages": torch.ones(1)}
    given |= {"mask": torch.ones(1, rows), "objective": o}
    seen = torch.arange(3).expand(1, rows, 3)
    teacher = {
        "alone": None,
        "a teacher": Teacher.from_logits(torch.randn(1, rows, V)),
        "a teacher's tokens": Teacher.from_top_k(seen, torch.full((1, rows, 3), -2.0)),
    }[beside]
    if form == "logits":
        found = outcome(logits, backend, **given, teacher=teacher, rollout_top_k=top)["d"]
    else:  # a head of unit vectors: its gradient is that of the logits
        if backend in ("triton", "cuda"):
            multiply_as_on_a_gpu(monkeypatch.setattr)
            narrowed = torch.bfloat16 if dtype == torch.float16 else dtype
        head = logits[0].T.contiguous().requires_grad_()
        unit = torch.eye(rows, dtype=dtype)[None]
        call = {**given, "teacher": teacher, "rollout_top_k": top, "backend": backend}
        fastrl.linear_policy_loss(unit, head, **call).loss.backward()
        found = head.grad.T[None]
    exact = with_terms_of_a_teacher(logits, given, top, teacher)
    error, size = (found - exact).abs(), exact.abs()
    of_alpha, float32 = 8 * 2**-24 / tail, 2**-23
    own = torch.finfo(narrowed).eps if dtype != torch.float32 else 0.0
    cancelled = 8 * float32 * 300 / rows if beside != "alone" else 1e-3 * float32
    assert (error <= (of_alpha + own) * size + cancelled).all()
    assert size.max() > 0.1


DRAWS = 40_000


def gradients(logits, log_q, top_ids, advantages_of, o):
    """The gradient of the loss of each draw of a sampler, `[DRAWS, V]`."""
    drawn_ids = torch.multinomial(log_q.exp(), DRAWS, replacement=True)
    top = TopKLogprobs(top_ids.expand(DRAWS, -1), log_q[top_ids].expand(DRAWS, -1))
    given = {"token_ids": drawn_ids, "advantages": advantages_of[drawn_ids], "objective": o}
    given["mask"] = torch.ones(DRAWS)
    if o.rollout_corrections:
        given["rollout_logprobs"] = log_q[drawn_ids]
    found = []
    for objective, more in ((o, {"rollout_top_k": top}), (without(o), {})):
        leaf = logits.expand(DRAWS, -1).clone().requires_grad_()
        call = {**given, "objective": objective, **more}
        fastrl.logits_policy_loss(leaf, **call).loss.backward()
        found.append(DRAWS * leaf.grad.double())
    return found


def deviations(sample, expected):
    """How many standard errors the mean of `[DRAWS, V]` is from what is expected, at most."""
    errors = sample.std(0) / math.sqrt(DRAWS)
    return float(((sample.mean(0) - expected).abs() / errors).max())


@pytest.mark.kernels
def test_on_policy_the_expected_gradient_is_unchanged():
    logits, advantages = torch.randn(8), torch.randn(8)
    log_p = logits.log_softmax(-1)
    o = centered("reinforce")
    with_term, plain = gradients(logits, log_p, log_p.topk(3).indices, advantages, o)
    p = log_p.exp().double()
    expected = -p * (advantages - (p * advantages).sum())
    assert deviations(with_term, expected) < 4
    assert deviations(plain, expected) < 4
    assert expected.abs().max() > 0.05


@pytest.mark.parametrize("kind", ["none", "truncated", "masked", "filtered"])
def test_a_wrong_sampler_with_a_constant_advantage_does_not_drift(kind):
    """The sampler's tail is in proportion to the policy's, as the tail of the model."""
    logits = torch.randn(8)
    p = logits.softmax(-1)
    head = p.topk(3).indices
    q = p.clone()
    q[head] *= torch.tensor([0.5, 1.1, 2.4])
    q /= q.sum()
    o = centered("reinforce", *WEIGHTS[kind])
    with_term, plain = gradients(logits, q.log(), head, torch.ones(8), o)
    assert deviations(with_term, 0.0) < 4
    assert deviations(plain, 0.0) > 20
