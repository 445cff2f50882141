"""The divergence from a teacher: against float64, next to 0, excluded tokens, K tokens, losses."""

import dataclasses
import math

import pytest
import torch

import fastrl
from fastrl import Objective, Teacher
from fastrl.ops._rows.hidden_inputs import checked_inputs
from tests.ops.teachers.divergences import BETAS, divergence, logprobs_of, top_events

pytestmark = pytest.mark.kernels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, V, WIDTH, K = 6, 300, 16, 7


def assert_close(found, exact, leaf, gradient, *, relative=2e-5):
    """Values to 1e-6 or 1e-5 of them; gradients to 2e-5 of the largest, and the dtype's rounding.

    A logarithm of a probability q with logits up to 16 is off by some 1e-6, and so is q log q.
    """
    error = (found.double() - exact).abs()
    assert (error <= 1e-6 + 1e-5 * exact.abs()).all(), error.max()
    unit = torch.finfo(leaf.dtype).eps / 2 if leaf.dtype != torch.float32 else 0.0
    error = (leaf.grad.double() - gradient).abs() - unit * gradient.abs()
    assert error.max() <= relative * gradient.abs().max() + (unit > 0) * 1e-7


@pytest.mark.some_on("triton")
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"temperature": 0.6},
        {"softcap": 5.0, "scale": 0.5},
        {"temperature": torch.rand(ROWS) + 0.5},
    ],
    ids=["plain", "temperature", "softcap", "per row"],
)
def test_logits_against_float64(backend, beta, dtype, own):
    student, teacher = (2 * torch.randn(ROWS, V)).to(dtype), (2 * torch.randn(ROWS, V)).to(dtype)
    names = {"scale": "logit_scale", "softcap": "logit_softcap"}
    options = {names.get(name, name): x for name, x in own.items()}
    for of_student, of_teacher in ((own, {}), ({}, own)):
        leaf = student.clone().requires_grad_()
        exact_leaf = student.double().requires_grad_()
        log_p = logprobs_of(teacher, **of_teacher)
        exact = divergence(logprobs_of(exact_leaf, **of_student), log_p, beta)
        upstream = torch.randn(ROWS)
        exact.backward(upstream.double())
        given = Teacher.from_logits(teacher, beta=beta, **(options if of_teacher else {}))
        found = fastrl.token_divergence(
            leaf, given, backend=backend, **(options if of_student else {})
        )
        found.backward(upstream)
        assert_close(found, exact.detach(), leaf, exact_leaf.grad)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_states_of_another_width(backend, beta, dtype):
    """Bias, LoRA and chunks on both sides; the logits of a GEMM of 16 products are off by 1e-6."""
    hidden, other = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(ROWS, 24).to(dtype)
    heads = [
        (
            torch.randn(V, width) / 4,
            torch.randn(V),
            (torch.randn(2, width) / 4, torch.randn(V, 2), 0.5),
        )
        for width in (WIDTH, 24)
    ]
    heads = [(w.to(dtype), b.to(dtype), (a.to(dtype), c.to(dtype), s)) for w, b, (a, c, s) in heads]

    def exact_logits(states, weight, bias, lora):
        states, a, b = states.double(), lora[0].double(), lora[1].double()
        return states @ weight.double().T + bias.double() + lora[2] * (states @ a.T) @ b.T

    leaves = [hidden.requires_grad_(), *(x.requires_grad_() for x in heads[0][:2])]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    log_p = exact_logits(other, *heads[1]).log_softmax(-1)
    log_q = exact_logits(doubles[0], doubles[1], doubles[2], heads[0][2]).log_softmax(-1)
    divergence(log_q, log_p, beta).sum().backward()
    (weight, bias, lora), (of_teacher, its_bias, its_lora) = heads
    teacher = Teacher.from_hidden(other, of_teacher, bias=its_bias, lora=its_lora, beta=beta)
    for compact in (True, False):
        for leaf in leaves:
            leaf.grad = None
        options = {"bias": bias, "lora": lora, "chunk_tokens": 4, "compact": compact}
        found = fastrl.linear_divergence(hidden, weight, teacher, backend=backend, **options)
        found.sum().backward()
        exact = divergence(log_q, log_p, beta).detach()
        assert_close(found, exact, leaves[0], doubles[0].grad, relative=5e-5)
        for leaf, double in zip(leaves[1:], doubles[1:], strict=True):
            budget = 5e-5 + torch.finfo(dtype).eps / 2 * (dtype != torch.float32)
            largest = double.grad.abs().max()
            assert (leaf.grad.double() - double.grad).abs().max() <= budget * largest


@pytest.mark.parametrize("beta", BETAS)
def test_equal_rows_give_exactly_zero(backend, beta):
    logits = (5 * torch.randn(ROWS, V) + 40).requires_grad_()
    teacher = Teacher.from_logits(logits.detach().clone(), beta=beta)
    found = fastrl.token_divergence(logits, teacher, backend=backend)
    found.sum().backward()
    assert (found == 0).all()
    assert (logits.grad == 0).all()
    weight, hidden = torch.randn(V, WIDTH), torch.randn(ROWS, WIDTH)
    same = Teacher.from_hidden(hidden.clone(), weight, beta=beta)
    assert (fastrl.linear_divergence(hidden, weight, same, backend=backend) == 0).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("apart", [1e-5, 1e-3])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_nearly_equal_rows(backend, beta, apart, offset):
    """Where the difference of two probabilities would have few digits."""
    student = 2 * torch.randn(ROWS, V)
    teacher = student + apart * torch.randn(ROWS, V) + offset
    leaf, double = student.requires_grad_(), student.detach().double().requires_grad_()
    exact = divergence(logprobs_of(double), logprobs_of(teacher), beta)
    exact.sum().backward()
    found = fastrl.token_divergence(leaf, Teacher.from_logits(teacher, beta=beta), backend=backend)
    found.sum().backward()
    assert (found >= 0).all()
    # the teacher's own rounding is in both; a normalizer's is at most 1e-6 of a probability
    assert_close(found, exact.detach(), leaf, double.grad, relative=2e-5 + 2e-6 * (offset > 0))


def test_excluded_tokens(backend):
    student, teacher = torch.randn(3, 5), torch.randn(3, 5)
    student[0, 1] = teacher[0, 1] = -math.inf  # both
    student[1, 2] = -math.inf  # the student alone
    teacher[2, 3] = -math.inf  # the teacher alone
    exact = {b: divergence(logprobs_of(student), logprobs_of(teacher), b) for b in BETAS}
    for beta, want in exact.items():
        leaf = student.clone().requires_grad_()
        given = Teacher.from_logits(teacher, beta=beta)
        found = fastrl.token_divergence(leaf, given, backend=backend)
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
        assert found.isinf().tolist() == [False, beta == 0, beta == 1]
        found[found.isfinite()].sum().backward()
        assert leaf.grad.isfinite().all()
        assert leaf.grad[0, 1] == 0


@pytest.mark.parametrize("has_tail", [True, False])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_of_the_most_probable_tokens(backend, form, beta, has_tail):
    """Also beside other statistics of the same rows, and where the tail has next to no mass."""
    hidden, weight = torch.randn(ROWS, WIDTH), torch.randn(V, WIDTH)
    hidden[:3] *= torch.tensor([[6.0], [0.01], [3.0]])
    log_p = (2 * torch.randn(ROWS, V)).log_softmax(-1)
    values, ids = log_p.topk(K, -1)
    tokens = ids[:, 0].clone()
    tokens[1] = (ids[1].max() + 1) % V
    teacher = Teacher.from_top_k(ids, values, has_tail=has_tail, beta=beta)
    slopes = torch.randn(3, ROWS)
    doubles = [x.double().requires_grad_() for x in (hidden, weight)]
    logits = doubles[0] @ doubles[1].T
    logits.retain_grad()
    log_q = logits.log_softmax(-1)
    events, wanted = log_q.gather(-1, ids), values.double()
    if has_tail:
        events, wanted = top_events(log_q, wanted, ids)
    else:
        events, wanted = events.log_softmax(-1), wanted.log_softmax(-1)
    exact = divergence(events, wanted, beta)
    entropy = -(log_q.exp() * log_q).sum(-1)
    parts = (log_q.gather(-1, tokens[:, None])[:, 0], entropy, exact)
    sum((x * g).sum() for x, g in zip(parts, slopes.double(), strict=True)).backward()
    options = {"outputs": ("logprobs", "entropy", "divergence"), "teacher": teacher}
    if form == "logits":
        leaf, gradient = logits.detach().float().requires_grad_(), logits.grad
        stats = fastrl.token_stats(leaf, tokens, backend=backend, **options)
    else:
        leaf, gradient = hidden.requires_grad_(), doubles[0].grad
        stats = fastrl.linear_token_stats(leaf, weight, tokens, backend=backend, **options)
    found = (stats.logprobs, stats.entropy, stats.divergence)
    sum((x * g).sum() for x, g in zip(found, slopes, strict=True)).backward()
    torch.testing.assert_close(stats.divergence.double(), exact.detach(), rtol=2e-5, atol=2e-6)
    assert (leaf.grad.double() - gradient).abs().max() <= 5e-5 * gradient.abs().max()


def test_statistics_beside_the_divergence(backend):
    student, teacher = torch.randn(ROWS, V), torch.randn(ROWS, V)
    teacher[0], teacher[1] = student[0], -student[1]
    given = Teacher.from_logits(teacher, temperature=0.5)
    ids = torch.randint(V, (ROWS,))
    options = {"outputs": fastrl.TokenStats._fields, "backend": backend}
    stats = fastrl.token_stats(student, ids, teacher=given, **options)
    alone = fastrl.token_stats(student, ids, outputs=("logprobs", "entropy"), backend=backend)
    digits = {"rtol": 2e-6, "atol": 0} if backend == "reference" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(stats.logprobs, alone.logprobs, **digits)
    torch.testing.assert_close(stats.entropy, alone.entropy, **digits)
    log_p = logprobs_of(teacher, temperature=0.5)
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(stats.teacher_entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    assert torch.equal(stats.agrees, student.argmax(-1) == teacher.argmax(-1))


OF_TEACHER = {"teacher_coef": 0.7}
EXACT = {"kl_estimator": "exact", "kl_coef": 0.2}


@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize(
    ("objective", "beta"),
    [
        (Objective(**OF_TEACHER), 1.0),
        (Objective(**OF_TEACHER, kl_coef=0.1, entropy_coef=0.01), 0.3),
        (Objective(**EXACT), 1.0),
        (Objective(**EXACT, kl_aggregation="seq-mean-token-mean"), 1.0),
        (Objective.preset("gspo", **OF_TEACHER), 0.0),
        (Objective(**OF_TEACHER), None),  # distillation alone
    ],
    ids=["teacher", "every term", "exact", "exact by sequence", "sequence level", "alone"],
)
def test_a_loss_with_a_teacher_is_the_loss_and_its_divergence(backend, form, objective, beta):
    hidden, weight = torch.randn(3, 5, WIDTH).requires_grad_(), torch.randn(40, WIDTH)
    weight.requires_grad_()
    ids, mask = torch.randint(40, (3, 5)), torch.rand(3, 5) > 0.3
    sampled = fastrl.token_logprobs((hidden @ weight.T).detach(), ids)
    alone = beta is None
    teacher = Teacher.from_hidden(
        torch.randn(3, 5, 9), torch.randn(40, 9), beta=1.0 if alone else beta
    )
    beside = {}
    if not alone:
        beside["old_logprobs"] = sampled + 0.1 * torch.randn(3, 5)
    if objective.kl_coef and not objective.has_exact_kl:
        beside["ref_logprobs"] = sampled + 0.1 * torch.randn(3, 5)
    given = (ids, None if alone else torch.randn(3), mask)
    options = {"teacher": teacher, "objective": objective, "backend": backend, **beside}
    if form == "logits":
        result = fastrl.logits_policy_loss(hidden @ weight.T, *given, **options)
    else:
        result = fastrl.linear_policy_loss(hidden, weight, *given, chunk_tokens=4, **options)
    found = torch.autograd.grad(3 * result.loss, (hidden, weight))

    stats = fastrl.linear_token_stats(
        hidden,
        weight,
        ids,
        outputs=("logprobs", "entropy", "divergence", "teacher_entropy", "agrees"),
        mask=mask,
        teacher=teacher,
        backend=backend,
    )
    plain = dataclasses.replace(objective, teacher_coef=0.0)
    coefficient, aggregation = objective.teacher_coef, objective.aggregation
    if objective.has_exact_kl:
        plain = dataclasses.replace(plain, kl_coef=0.0, kl_estimator="k3", kl_aggregation=None)
        coefficient = objective.kl_coef
        aggregation = objective.kl_aggregation or aggregation
    advantages = torch.zeros(3) if alone else given[1]
    policy = fastrl.policy_loss(
        stats.logprobs,
        advantages,
        mask,
        entropy=stats.entropy,
        objective=plain,
        backend=backend,
        **beside,
    )
    weights = fastrl.token_weights(mask, aggregation=aggregation)
    total = policy.loss + coefficient * (weights * stats.divergence).sum()
    wanted = torch.autograd.grad(3 * total, (hidden, weight))
    torch.testing.assert_close(result.loss, total, rtol=1e-5, atol=1e-6)
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).abs().max() <= 1e-5 * y.abs().max()
    mean = (stats.divergence * mask).sum() / mask.sum()
    torch.testing.assert_close(result.metrics["divergence"], mean.detach())
    kl_metric = mean.detach() if objective.has_exact_kl else policy.metrics.get("kl")
    torch.testing.assert_close(result.metrics.get("kl"), kl_metric)
    agreement = (stats.agrees & mask).sum() / mask.sum()
    torch.testing.assert_close(result.metrics["teacher_agreement"], agreement)
    reduced = fastrl.reduce_metrics([result.metrics, result.metrics])
    torch.testing.assert_close(reduced["divergence"], result.metrics["divergence"])


def test_a_frozen_head_has_a_gradient_of_hidden_states_alone(backend):
    hidden, weight = torch.randn(ROWS, WIDTH).requires_grad_(), torch.randn(V, WIDTH)
    teacher = Teacher.from_hidden(torch.randn(ROWS, WIDTH), weight)
    result = fastrl.linear_policy_loss(
        hidden,
        weight,
        torch.zeros(ROWS, dtype=torch.int64),
        None,
        torch.ones(ROWS),
        teacher=teacher,
        objective=Objective(teacher_coef=1.0),
        backend=backend,
    )
    result.loss.backward()
    wanted = fastrl.linear_divergence(hidden, weight, teacher, backend=backend).mean()
    torch.testing.assert_close(result.loss, wanted)
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(wanted, hidden)[0])


def test_a_teacher_that_is_sure_of_its_tokens(backend):
    """Their rounded probabilities may sum to 1; the tail is then what rounding leaves."""
    log_p = (40 * torch.rand(8, 60)).log_softmax(-1)
    log_p[0] = torch.where(torch.arange(60) == 3, 0.0, -50.0)
    student = torch.randn(8, 60)
    for dtype in DTYPES:
        values, ids = log_p.to(dtype).topk(K, -1)
        for beta in BETAS:
            leaf = student.clone().requires_grad_()
            teacher = Teacher.from_top_k(ids, values, beta=beta)
            found = fastrl.token_divergence(leaf, teacher, backend=backend)
            found.sum().backward()
            assert found.isfinite().all()
            assert leaf.grad.isfinite().all()
    values, ids = log_p.topk(60, -1)  # of every token: there is no tail
    every = fastrl.token_divergence(student, Teacher.from_top_k(ids, values, beta=0.0))
    whole = fastrl.token_divergence(student, Teacher.from_logits(log_p, beta=0.0))
    torch.testing.assert_close(every, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_tail", [True, False])
def test_agreement_is_of_tokens_also_with_the_most_probable_alone(backend, has_tail):
    student, log_p = 2 * torch.randn(200, 40), (2 * torch.randn(200, 40)).log_softmax(-1)
    student[::2] += 4 * log_p[::2]
    values, ids = log_p.topk(3, -1)
    teacher = Teacher.from_top_k(ids, values, has_tail=has_tail)
    tokens = torch.zeros(200, dtype=torch.int64)
    options = {"outputs": ("agrees",), "teacher": teacher, "backend": backend}
    wanted = student.argmax(-1) == log_p.argmax(-1)
    assert torch.equal(fastrl.token_stats(student, tokens, **options).agrees, wanted)
    eye = torch.eye(40)
    assert torch.equal(fastrl.linear_token_stats(student, eye, tokens, **options).agrees, wanted)


def test_a_gradient_in_place_may_not_overwrite_a_teacher():
    base = torch.randn(2, 5, 50).requires_grad_() * 1.0
    shifted, same = Teacher.from_logits(base.detach()[:, :-1]), Teacher.from_logits(base.detach())
    with pytest.raises(ValueError, match="must not share memory"):
        fastrl.token_divergence(base[:, 1:], shifted, inplace_backward=True)
    assert (fastrl.token_divergence(base, same, inplace_backward=True) == 0).all()


def test_shifted_logits_of_a_teacher_are_not_copied(backend):
    """`logits[:, :-1]` is how a trainer has them."""
    hidden, weight = torch.randn(2, 4, WIDTH).requires_grad_(), torch.randn(V, WIDTH)
    logits, mask = torch.randn(2, 5, V), torch.rand(2, 4) > 0.3
    found = []
    for given in (logits[:, 1:], logits[:, 1:].contiguous()):
        teacher = Teacher.from_logits(given)
        divergence = fastrl.linear_divergence(
            hidden, weight, teacher, mask=mask, chunk_tokens=3, backend=backend
        )
        found.append((divergence, *torch.autograd.grad(divergence.sum(), hidden)))
    assert all(map(torch.equal, *found))
    assert teacher_arguments_of(logits[:, 1:]).source.logits.data_ptr() == logits[:, 1:].data_ptr()


def teacher_arguments_of(logits):
    """What the operators of the linear forms get."""
    rows, hidden = logits.shape[:2], torch.zeros(*logits.shape[:2], WIDTH)
    checked = checked_inputs(
        hidden, torch.zeros(V, WIDTH), torch.zeros(rows).long(), None, None, None, 1.0, 1.0, None,
        -100, None, True, None, Teacher.from_logits(logits),
    )  # fmt: skip
    return checked.teacher
