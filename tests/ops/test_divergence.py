"""The divergence from a teacher beside its values: equal rows, K tokens, losses, memory."""

import dataclasses

import pytest
import torch

import fastrl
from fastrl import KeptTokens, Objective, Teacher
from fastrl.ops._rows.hidden_inputs import checked_inputs

pytestmark = pytest.mark.kernels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
ROWS, V, WIDTH, K = 6, 300, 16, 7


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
def test_nearly_equal_rows_far_from_each_other(backend, beta, apart):
    """Where the difference of two probabilities, or of two logits, would have few digits."""
    student = 2 * torch.randn(ROWS, V)
    teacher, found = student + apart * torch.randn(ROWS, V) + 300.0, []
    for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        leaf = student.to(dtype, copy=True).requires_grad_()
        given = Teacher.from_logits(teacher.to(dtype), beta=beta)
        value = fastrl.token_divergence(leaf, given, backend=name)
        value.sum().backward()
        found.append((value.detach().double(), leaf.grad.double()))
    (value, gradient), (exact, wanted) = found
    assert (value >= 0).all()
    # the teacher's own rounding is in both; a normalizer's is at most 1e-6 of a probability
    torch.testing.assert_close(value, exact, rtol=1e-5, atol=1e-6)
    assert (gradient - wanted).abs().max() <= 2.2e-5 * wanted.abs().max()


def test_the_value_jumps_at_the_ends():
    """It goes to 0 with beta, while beta = 0 itself is a KL; its quotient by beta does not jump."""
    student, teacher = torch.randn(3, 9), torch.randn(3, 9)
    at = {
        b: fastrl.token_divergence(student, Teacher.from_logits(teacher, beta=b))
        for b in (0.0, 1e-6, 1 - 1e-6, 1.0)
    }
    torch.testing.assert_close(at[1e-6] / 1e-6, at[0.0], rtol=1e-4, atol=0)
    torch.testing.assert_close(at[1 - 1e-6] / 1e-6, at[1.0], rtol=1e-4, atol=0)


OF_TEACHER = {"teacher_coef": 0.7}
EXACT = {"kl_estimator": "exact", "kl_coef": 0.2}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("form", ["logits", "in place", "hidden"])
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
def test_a_loss_with_a_teacher_is_the_loss_and_its_divergence(backend, form, objective, beta, kept):
    hidden, weight = torch.randn(3, 5, WIDTH).requires_grad_(), torch.randn(40, WIDTH)
    weight.requires_grad_()
    ids, mask = torch.randint(40, (3, 5)), torch.rand(3, 5) > 0.3
    sampled = fastrl.token_logprobs((hidden @ weight.T).detach(), ids)
    alone = beta is None
    teacher = Teacher.from_hidden(
        torch.randn(3, 5, 9), torch.randn(40, 9), beta=1.0 if alone else beta
    )
    sets = KeptTokens.from_lists([torch.randperm(40)[: 4 * (n % 4)].tolist() for n in range(15)])
    beside, sets = {}, sets if kept else None
    if not alone:
        beside["old_logprobs"] = sampled + 0.1 * torch.randn(3, 5)
    if objective.kl_coef and not objective.has_exact_kl:
        beside["ref_logprobs"] = sampled + 0.1 * torch.randn(3, 5)
    given = (ids, None if alone else torch.randn(3), mask)
    options = {"teacher": teacher, "objective": objective, "backend": backend, **beside}
    options["kept"] = sets
    if form != "hidden":
        options["inplace"] = form == "in place"
        result = fastrl.logits_policy_loss(hidden @ weight.T, *given, **options)
    else:
        result = fastrl.linear_policy_loss(hidden, weight, *given, chunk_tokens=4, **options)
    found = torch.autograd.grad(3 * result.loss, (hidden, weight))
    if form == "hidden":  # a frozen head has a gradient of hidden states alone
        frozen = fastrl.linear_policy_loss(hidden, weight.detach(), *given, **options)
        (of_hidden,) = torch.autograd.grad(3 * frozen.loss, hidden)
        torch.testing.assert_close(of_hidden, found[0], rtol=1e-5, atol=1e-6)

    stats = fastrl.linear_token_stats(
        hidden,
        weight,
        ids,
        outputs=("logprobs", "entropy", "divergence", "teacher_entropy", "agrees"),
        mask=mask,
        teacher=teacher,
        kept=sets,
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
