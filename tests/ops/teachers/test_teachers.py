"""Every kind of teacher: statistics by themselves, tails, memory, refusals."""

import math

import pytest
import torch

import fastrl
from fastrl import Teacher, TokenStats

pytestmark = pytest.mark.kernels
B, T, V, WIDTH, K = 2, 9, 300, 8, 5
KINDS = ("logits", "hidden", "tokens", "tokens and a tail")


def teacher_of(kind, shape=(B, T), **options):
    """A teacher for rows of this shape; its logits are a part of those of longer sequences."""
    if kind == "hidden":
        return Teacher.from_hidden(torch.randn(*shape, 6), torch.randn(V, 6), beta=0.3, **options)
    logits = 2 * torch.randn(*shape[:-1], shape[-1] + 1, V)
    logits = logits[..., 1:, :]
    if kind == "logits":
        return Teacher.from_logits(logits, beta=0.3, **options)
    logprobs, ids = logits.log_softmax(-1).topk(K)
    return Teacher.from_top_k(ids, logprobs, has_tail="tail" in kind, beta=0.3)


def stats_of(form, student, ids, teacher, **options):
    function = fastrl.token_stats if form == "logits" else fastrl.linear_token_stats
    return function(*student, ids, teacher=teacher, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_a_statistic_does_not_depend_on_the_others(backend, kind, form):
    """Neither its values nor its gradient: each alone equals what it is among all."""
    student = [torch.randn(3, V if form == "logits" else WIDTH)]
    student += [torch.randn(V, WIDTH)] if form == "hidden" else []
    ids, teacher, found = torch.arange(3), teacher_of(kind, (3,)), {}
    for names in (TokenStats._fields, *((name,) for name in TokenStats._fields)):
        leaves = [x.clone().requires_grad_() for x in student]
        stats = stats_of(form, leaves, ids, teacher, outputs=names, backend=backend)
        for name in names:
            x = getattr(stats, name)
            found.setdefault(name, []).append(x.detach())
            if x.requires_grad:
                found[name] += torch.autograd.grad(x.sum(), leaves, retain_graph=True)
    for name, results in found.items():
        half = len(results) // 2
        assert len(results) in (2, 2 * (1 + len(student)))
        for together, alone in zip(results[:half], results[half:], strict=True):
            torch.testing.assert_close(alone, together, rtol=1e-6, atol=1e-6, msg=name)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_log_probabilities_may_sum_to_more_than_1(backend, dtype):
    for count in (1, 2, 3, 10, 50):
        ids = torch.arange(count)[None]
        logprobs = torch.full((1, count), -math.log(count), dtype=torch.float64).to(dtype)
        teacher = Teacher.from_top_k(ids, logprobs)
        assert fastrl.token_divergence(torch.zeros(1, V), teacher, backend=backend).isfinite()
    more = Teacher.from_top_k(ids, (logprobs.double() + math.log(1.25)).to(dtype))
    with pytest.raises(ValueError, match=r"which sum to at most 1, got 1\.2"):
        fastrl.token_divergence(torch.zeros(1, V), more, backend=backend)


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": torch.ones(B, T)},
        {"temperature": torch.tensor(1.0)},
        {"temperature": 0.7},
        {"logit_scale": 2.0},
        {"logit_softcap": 5.0},
    ],
    ids=str,
)
def test_what_has_no_effect_on_log_probabilities_is_refused(backend, option):
    (name,) = option
    teacher = teacher_of("tokens")._replace(**option)
    with pytest.raises(ValueError, match=f"teacher.{name} has no effect on log-probabilities"):
        fastrl.token_divergence(torch.randn(B, T, V), teacher, backend=backend)


@pytest.mark.not_on("triton", "cuda")
def test_a_teacher_beside_the_logits_that_a_gradient_overwrites(backend):
    """In the same memory, before them, behind them, but apart."""
    for student, teacher in ((0, 1), (1, 0)):
        base = torch.randn(2, 3, V).requires_grad_() * 1.0
        given = Teacher.from_logits(base.detach()[teacher].clone())
        (wanted,) = torch.autograd.grad(
            fastrl.token_divergence(base[student], given, backend=backend).sum(), base
        )
        near = Teacher.from_logits(base.detach()[teacher])
        found = fastrl.token_divergence(base[student], near, inplace_backward=True, backend=backend)
        (came,) = torch.autograd.grad(found.sum(), base)
        torch.testing.assert_close(came, wanted)


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_a_rejected_token_may_have_an_infinite_kl(backend, form):
    """Its KL from a reference that excludes a token has weight 0, and so no effect on the loss."""
    hidden, weight = torch.randn(1, 4, WIDTH), torch.randn(20, WIDTH)
    student, ids, ones = hidden @ weight.T, torch.randint(20, (1, 4)), torch.ones(1, 4)
    old = fastrl.token_logprobs(student, ids)
    sampled = old - 3 * torch.tensor([[0.0, 1, 0, 0]])
    correction = fastrl.RolloutCorrection(kind="mask", high=2.0)
    objective = fastrl.Objective(
        kl_estimator="exact", kl_coef=0.2, rollout_correction=correction, aggregation="token-mean"
    )
    options = {"old_logprobs": old, "rollout_logprobs": sampled, "objective": objective}
    found = []
    for lowest in (0.0, -math.inf):
        others = torch.ones(1, 4, 20)
        others[0, 1, 3] = lowest
        options |= {"teacher": Teacher.from_logits(others), "backend": backend}
        leaf = (student if form == "logits" else hidden).clone().requires_grad_()
        if form == "logits":
            loss = fastrl.logits_policy_loss(leaf, ids, ones[:, 0], ones, **options).loss
        else:
            loss = fastrl.linear_policy_loss(leaf, weight, ids, ones[:, 0], ones, **options).loss
        loss.backward()
        assert (leaf.grad[0, 1] == 0).all()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_row_without_a_slope_of_its_divergence_needs_no_teacher(backend, beta):
    logits, ids, found = torch.randn(3, V), torch.arange(3), []
    slopes = torch.tensor([0.0, 1.0, 0.0])
    for broken in (False, True):
        teacher = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
        teacher[::2] = math.nan if broken else teacher[::2]
        leaf = logits.clone().requires_grad_()
        given = {"outputs": ("logprobs", "entropy", "divergence"), "backend": backend}
        given["teacher"] = Teacher.from_logits(teacher, beta=beta)
        stats = fastrl.token_stats(leaf, ids, **given)
        divergence = torch.where(slopes == 0, 0.0, stats.divergence * slopes)
        (stats.logprobs - stats.entropy + divergence).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_tail_is_what_float64_logprobs_leave(backend, beta, dtype):
    """Also beside float32 logits, and as the rounding error of 1 in float64 if nothing is left."""
    left = torch.tensor([1e-4, 1e-6, 1e-7, 1e-8, 1e-10, 1e-13, 0.0], dtype=torch.float64)
    log_p = torch.stack([torch.full_like(left, 0.6), 0.4 - left], -1).log()
    ids = torch.tensor([[1, 3]]).expand(len(left), 2)
    logits = torch.tensor([[0.0, 5.0, 0.0, 4.0]], dtype=torch.float64).expand(len(left), 4)
    mass = (1 - log_p.exp().sum(-1)).clamp(min=torch.finfo(torch.float64).eps)
    # the same as three events whose log-probabilities are known
    events = torch.stack([*logits[:, 1::2].unbind(-1), logits[:, ::2].logsumexp(-1)], -1)
    whole = Teacher.from_logits(torch.cat([log_p, mass.log()[:, None]], -1), beta=beta)
    exact = fastrl.token_divergence(events, whole, backend="reference")
    if backend != "reference" and dtype == torch.float64:
        backend = "auto"  # which computes float64
    teacher = Teacher.from_top_k(ids, log_p, beta=beta)
    found = fastrl.token_divergence(logits.to(dtype), teacher, backend=backend)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
