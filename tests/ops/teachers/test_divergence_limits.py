"""Divergences at their limits: excluded tokens, and Jensen-Shannon next to its ends."""

import itertools
import math

import pytest
import torch

import fastrl
from fastrl import Objective, Teacher
from tests.ops.teachers.divergences import BETAS, logprobs_of

pytestmark = pytest.mark.kernels
LOWEST = {str(t): torch.finfo(t).min for t in (torch.float32, torch.bfloat16, torch.float16)}
LOWEST["inf"] = -math.inf
NEAR_ENDS = (1e-9, 1e-6, 1e-4, 1e-3)


def compared(student, teacher, backend, *, of_student=None, of_teacher=None):
    """Divergences, and the gradient of their sum."""
    leaf = student.clone().requires_grad_()
    given = teacher._replace(**(of_teacher or {}))
    found = fastrl.token_divergence(leaf, given, backend=backend, **(of_student or {}))
    found.sum().backward()
    return found.detach(), leaf.grad


SCALINGS = [
    ({}, {}),
    ({"temperature": 0.7}, {}),
    ({}, {"temperature": 0.7}),
    ({"temperature": torch.tensor([0.1, 0.7, 1.0, 1.5])}, {"temperature": 3.0}),
    ({"logit_scale": 2.0}, {"temperature": 0.5}),
    ({"logit_scale": 2.0, "temperature": 0.7}, {"logit_softcap": 5.0}),
    ({"logit_softcap": 5.0}, {"logit_softcap": 5.0, "temperature": 0.1}),
]


@pytest.mark.some_on("triton")
@pytest.mark.parametrize("beta", [*BETAS, 1e-6])
@pytest.mark.parametrize("scalings", SCALINGS, ids=range(len(SCALINGS)))
def test_a_lowest_number_excludes_a_token_from_both(backend, scalings, beta):
    """The result is that of rows without the column, whatever excludes it on each side."""
    student, teacher = torch.randn(4, 6), torch.randn(4, 6)
    capped = ["logit_softcap" in of_side for of_side in scalings]
    of_student, of_teacher = scalings
    options = {"of_student": of_student, "of_teacher": of_teacher}
    wanted = compared(student, Teacher.from_logits(teacher, beta=beta), backend, **options)
    for low, high in itertools.product(LOWEST, LOWEST):
        lows = (LOWEST[low], LOWEST[high])
        # a softcap lifts a finite number; 65504 below the largest is far for one logarithm alone
        if any(c and x > -math.inf for c, x in zip(capped, lows, strict=True)):
            continue
        if (low == "torch.float16") != (high == "torch.float16"):
            continue
        columns = (torch.full((4, 1), low) for low in lows)
        rows = [torch.cat([x, c], -1) for x, c in zip((student, teacher), columns, strict=True)]
        given = Teacher.from_logits(rows[1], beta=beta)
        found, gradient = compared(rows[0], given, backend, **options)
        torch.testing.assert_close(found, wanted[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(gradient[:, :6], wanted[1], rtol=1e-5, atol=1e-6)
        assert (gradient[:, 6] == 0).all()


@pytest.mark.parametrize("lowest", [x for x in LOWEST if x != "torch.float16"])
@pytest.mark.parametrize("form", ["logits", "hidden", "loss"])
def test_a_token_that_one_model_excludes(backend, form, lowest):
    """Reverse: infinite, without a gradient. Forward: infinite, q - p. Between: finite."""
    head, own = torch.randn(7, 5), torch.randn(7, 3)
    bias = torch.zeros(7)
    bias[4] = LOWEST[lowest]
    hidden, states = torch.randn(6, 5), torch.randn(6, 3)
    ids = torch.zeros(6, dtype=torch.int64)

    def run(beta, of_student, of_teacher):
        x = hidden.clone().requires_grad_()
        if form == "logits":
            teacher = Teacher.from_logits(states @ own.T + of_teacher, beta=beta, temperature=0.7)
            found = fastrl.token_divergence(x @ head.T + of_student, teacher, backend=backend)
            found.sum().backward()
            return found.detach(), x.grad
        teacher = Teacher.from_hidden(states, own, bias=of_teacher, beta=beta, temperature=0.7)
        if form == "hidden":
            found = fastrl.linear_divergence(x, head, teacher, bias=of_student, backend=backend)
            found.sum().backward()
            return found.detach(), x.grad
        loss = fastrl.linear_policy_loss(
            *(x, head, ids, None, torch.ones(6)),
            bias=of_student,
            teacher=teacher,
            objective=Objective(teacher_coef=1.0, aggregation="token-sum"),
            backend=backend,
        ).loss
        loss.backward()
        return loss.detach(), x.grad

    none = torch.zeros(7)
    value, gradient = run(1.0, none, bias)
    assert (value == math.inf).all()
    assert (gradient == 0).all()
    value, gradient = run(0.0, bias, none)
    assert (value == math.inf).all()
    q = (hidden @ head.T + bias).softmax(-1)
    p = ((states @ own.T) / 0.7).softmax(-1)
    wanted = torch.where(bias == -math.inf, 0.0, q - p) @ head  # a finite logit can rise again
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
    for beta, sides in itertools.product((1e-6, 0.5, 1 - 1e-6), ((bias, none), (none, bias))):
        value, gradient = run(beta, *sides)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
    for beta, sides in ((0.0, (none, bias)), (1.0, (bias, none))):
        value, gradient = run(beta, *sides)
        assert value.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.some_on("triton")
@pytest.mark.parametrize("beta", [*NEAR_ENDS, *(1 - x for x in NEAR_ENDS)])
@pytest.mark.parametrize("spread", [0.3, 12.0])
@pytest.mark.parametrize("kind", ["logits", "tokens"])
def test_jensen_shannon_next_to_its_ends(backend, kind, spread, beta):
    """As accurate as elsewhere, though the divergence itself goes to 0 there."""
    student, teacher = spread * torch.randn(8, 300), spread * torch.randn(8, 300)
    leaf, double = student.clone().requires_grad_(), student.double().requires_grad_()
    events = (logprobs_of(double), logprobs_of(teacher))
    given = Teacher.from_logits(teacher, beta=beta)
    if kind == "tokens":
        ids = torch.arange(300).expand(8, 300)[:, ::9]
        events = [x[:, ::9].log_softmax(-1) for x in events]
        given = Teacher.from_top_k(ids, events[1].float(), has_tail=False, beta=beta)
    exact = by_series(*events, beta)
    exact.sum().backward()
    found = fastrl.token_divergence(leaf, given, backend=backend)
    found.sum().backward()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=1e-12)
    error = (leaf.grad.double() - double.grad).abs()
    # logits up to 40, and row statistics by approximate exponentials: 3.3e-5 has come
    most = 5e-5 if backend == "cuda" and kind == "logits" else 2e-5
    assert error.max() <= most * double.grad.abs().max()


def by_series(log_q, log_p, beta):
    """The divergence, with logarithms of the mixture that keep a share of 1e-9."""
    ratio = log_q - log_p

    def mixed(share, distance):  # log(1 - share + share e^distance)
        far = distance + torch.log(share + (1 - share) * torch.exp(-distance.clamp(min=0)))
        return torch.where(
            distance > 0, far, torch.log1p(share * torch.expm1(distance.clamp(max=1)))
        )

    of_q, of_p = mixed(beta, -ratio), mixed(1 - beta, ratio)
    return -(beta * log_p.exp() * of_p + (1 - beta) * log_q.exp() * of_q).sum(-1)


def test_the_value_jumps_at_the_ends():
    """It goes to 0 with beta, while beta = 0 itself is a KL; its quotient by beta does not jump."""
    student, teacher = torch.randn(3, 9), torch.randn(3, 9)
    at = {
        b: fastrl.token_divergence(student, Teacher.from_logits(teacher, beta=b))
        for b in (0.0, 1e-6, 1 - 1e-6, 1.0)
    }
    torch.testing.assert_close(at[1e-6] / 1e-6, at[0.0], rtol=1e-4, atol=0)
    torch.testing.assert_close(at[1 - 1e-6] / 1e-6, at[1.0], rtol=1e-4, atol=0)
