"""Every kind of teacher: rows that do not count, dtypes, empty calls, memory, refusals."""

import math

import pytest
import torch

import fastrl
from fastrl import Teacher, TokenStats
from fastrl.ops._rows.statistics import OF_ROW

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


def rows_of(teacher, chosen):
    """The teacher of some rows."""
    per_row = ("hidden", "logits", "token_ids", "logprobs", "temperature")
    given = {name: getattr(teacher, name) for name in per_row}
    some = {name: x[chosen] for name, x in given.items() if isinstance(x, torch.Tensor)}
    return teacher._replace(**some)


def stats_of(form, student, ids, teacher, **options):
    function = fastrl.token_stats if form == "logits" else fastrl.linear_token_stats
    return function(*student, ids, teacher=teacher, **options)


def student_of(form):
    if form == "logits":
        return [2 * torch.randn(B, T, V)]
    return [torch.randn(B, T, WIDTH), torch.randn(V, WIDTH)]


@pytest.mark.parametrize("form", ["logits", "hidden", "hidden, all rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_do_not_count_change_nothing(backend, kind, form):
    """Rows in which everything is NaN or out of range, some masked, some of the ignored id."""
    ids, number = torch.randint(1, V, (B, T)), torch.arange(B * T).view(B, T)
    counted = number % 5 % 3 > 0
    mask = counted | (number % 2 == 0)
    ids[~counted], ids[~mask] = 0, -1
    temperatures = {"temperature": torch.rand(B, T) + 0.5} if "tokens" not in kind else {}
    teacher, student = teacher_of(kind, **temperatures), student_of(form)
    wanted = rows_of(teacher, counted)
    even = ~counted & (number % 2 == 0)
    for x, wrong in (
        *((getattr(teacher, name), math.nan) for name in ("hidden", "logits", "logprobs")),
        *((x, math.nan) for x in (student[0], *temperatures.values())),
        (teacher.token_ids, V + 3),
    ):
        if x is not None:
            x[even] = wrong
            if x.dtype != torch.int64:
                x[~counted & ~even] = 7.0  # finite, but no log-probability
    names = TokenStats._fields if "tokens" not in kind else (*OF_ROW, "divergence", "agrees")
    options = {"outputs": names, "backend": backend}
    chunks = {} if form == "logits" else {"chunk_tokens": 4, "compact": form == "hidden"}
    leaves = [x.clone().requires_grad_() for x in student]
    stats = stats_of(form, leaves, ids, teacher, mask=mask, ignore_index=0, **chunks, **options)
    alone = [student[0][counted].requires_grad_(), *(x.requires_grad_() for x in student[1:])]
    expected = stats_of(form, alone, ids[counted], wanted, **options)
    for name in names:
        found = getattr(stats, name)
        assert (found[~counted] == 0).all(), name
        torch.testing.assert_close(
            found[counted], getattr(expected, name), rtol=1e-5, atol=3e-6, msg=name
        )
    for one in (stats, expected):
        (one.divergence.sum() - one.entropy.sum()).backward()
    assert (leaves[0].grad[~counted] == 0).all()
    found = leaves[0].grad[counted], *(x.grad for x in leaves[1:])
    for x, y in zip(found, alone, strict=True):
        assert (x - y.grad).abs().max() <= 2e-5 * y.grad.abs().max()


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_a_call_without_rows_has_the_dtypes_of_any_other(backend, kind, form):
    found = []
    for shape in ((1, 2), (0, 2), (2, 0)):
        student = [torch.randn(*shape, V if form == "logits" else WIDTH, requires_grad=True)]
        student += [torch.randn(V, WIDTH)] if form == "hidden" else []
        ids = torch.zeros(shape, dtype=torch.int64)
        options = {"outputs": TokenStats._fields, "backend": backend}
        stats = stats_of(form, student, ids, teacher_of(kind, shape), **options)
        assert all(x.shape == shape for x in stats)
        found.append([(x.dtype, x.requires_grad) for x in stats])
        stats.divergence.sum().backward()
        assert student[0].grad.isfinite().all()
    assert found[1:] == found[:1] * 2
    differentiable = {name for name, of in zip(stats._fields, found[0], strict=True) if of[1]}
    assert differentiable == {"logprobs", "entropy", "logsumexp", "divergence"}


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("kind", ["logits", "hidden"])
def test_student_and_teacher_of_any_two_dtypes(backend, kind, per_row):
    """As if the teacher's values came in float64: what rounds them is the student's arithmetic."""
    temperature = torch.rand(4) + 0.5 if per_row else 0.7
    for student in DTYPES if backend == "reference" else DTYPES[1:]:
        logits = (2 * torch.randn(4, V)).to(student)
        log_q = logits.double().log_softmax(-1)
        for dtype in DTYPES:
            hidden, weight = torch.randn(4, WIDTH).to(dtype), torch.randn(V, WIDTH).to(dtype)
            options = {
                "temperature": temperature
                if dtype != DTYPES[0] or not per_row
                else temperature.double()
            }
            given = hidden.double() @ weight.double().T
            if kind == "logits":
                given = given.to(dtype)
                teacher = Teacher.from_logits(given, **options)
            else:
                teacher = Teacher.from_hidden(hidden, weight, **options)
            found = fastrl.token_divergence(logits, teacher, backend=backend)
            heat = temperature[:, None].double() if per_row else temperature
            log_p = (given.double() / heat).log_softmax(-1)
            exact = (log_q.exp() * (log_q - log_p)).sum(-1)
            assert found.dtype == (torch.float64 if student == torch.float64 else torch.float32)
            torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=1e-5)


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


@pytest.mark.parametrize("has_tail", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_k_of_all_tokens(backend, beta, has_tail):
    """Then there is no event besides them, also with a tail; their order has no effect."""
    logits, log_p = 2 * torch.randn(6, 40), (2 * torch.randn(6, 40)).log_softmax(-1)
    ids = torch.stack([torch.randperm(40) for _ in range(6)])
    of_tokens = Teacher.from_top_k(ids, log_p.gather(1, ids), has_tail=has_tail, beta=beta)
    found = []
    for teacher in (of_tokens, Teacher.from_logits(log_p, beta=beta)):
        leaf = logits.clone().requires_grad_()
        divergence = fastrl.token_divergence(leaf, teacher, backend=backend)
        divergence.sum().backward()
        found.append((divergence, leaf.grad))
    torch.testing.assert_close(*found, rtol=1e-5, atol=2e-6)


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


def log_softmax(logits, temperature=1.0, logit_scale=1.0, logit_softcap=None):
    z = logits.double() * logit_scale
    z = z if logit_softcap is None else logit_softcap * torch.tanh(z / logit_softcap)
    heat = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    return (z / heat).log_softmax(-1), (z / heat).logsumexp(-1)


def divergence(log_q, log_p, beta):
    log_m = log_q if beta == 0 else log_p
    if 0 < beta < 1:
        log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
    of_p, of_q = log_p.exp() * (log_p - log_m), log_q.exp() * (log_q - log_m)
    return {0.0: of_p, 1.0: of_q}.get(beta, beta * of_p + (1 - beta) * of_q).sum(-1)


HEATS = 0.5 + torch.arange(6).view(2, 3) / 5
SCALINGS = {
    "per row": (
        {"temperature": HEATS, "logit_scale": 1.7},
        {"temperature": 2 - HEATS, "logit_softcap": 6.0},
    ),
    "one softcap, two factors": (
        {"logit_softcap": 5.0, "logit_scale": 0.5, "temperature": 0.6},
        {"logit_softcap": 5.0, "logit_scale": 0.8, "temperature": 0.6},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_gradients_of_all_statistics_at_once(backend, scaling, beta, dtype):
    """Of rows of two blocks in longer sequences; a row without a slope of its divergence needs no
    teacher, whose row may be NaN there."""
    size = 300 if backend in ("triton", "cuda") else 5000
    own, of_teacher = SCALINGS[scaling]
    upstream = torch.randn(4, 2, 3)  # of logprobs, entropy, logsumexp and divergence
    upstream[3, 0, 1:] = upstream[0, 0, 2] = upstream[2, 0, 2] = 0  # all but one; entropy alone
    upstream[:3, 1, 0] = upstream[:, 1, 1] = 0  # divergence alone; nothing
    logits, teacher = ((2 * torch.randn(2, 4, size)).to(dtype) for _ in range(2))
    ids = torch.randint(size, (2, 3))
    exact_leaf = logits.double().requires_grad_()
    log_q, logsumexp = log_softmax(exact_leaf[:, :-1], **own)
    log_p, _ = log_softmax(teacher[:, :-1], **of_teacher)
    stats = log_q.gather(-1, ids[..., None])[..., 0], -(log_q.exp() * log_q).sum(-1), logsumexp
    exact = (*stats, divergence(log_q, log_p, beta))
    sum((x * g).sum() for x, g in zip(exact, upstream.double(), strict=True)).backward()
    teacher[:, :-1][upstream[3] == 0] = math.nan
    given = Teacher.from_logits(teacher[:, :-1], beta=beta, **of_teacher)
    outputs = ("logprobs", "entropy", "logsumexp", "divergence")
    leaf = logits.clone().requires_grad_()
    found = fastrl.token_stats(
        leaf[:, :-1], ids, outputs=outputs, teacher=given, backend=backend, **own
    )
    terms = [getattr(found, name) for name in outputs]
    terms = [torch.where(g == 0, 0.0, x * g) for x, g in zip(terms, upstream, strict=True)]
    sum(term.sum() for term in terms).backward()
    error = (leaf.grad.double() - exact_leaf.grad).abs()
    unit = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    largest = exact_leaf.grad.abs().amax(-1, keepdim=True)
    assert (error <= 2e-5 * largest + unit * exact_leaf.grad.abs() + 1e-8).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_a_token_that_the_student_excludes_has_no_gradient(backend, beta, softcap):
    """Also where the divergence is infinite: those of the other tokens are then still right."""
    logits, teacher = torch.randn(3, 40), torch.randn(3, 40)
    logits[:, 3] = -math.inf
    leaf = logits.clone().requires_grad_()
    given = Teacher.from_logits(teacher, beta=beta)
    fastrl.token_divergence(leaf, given, logit_softcap=softcap, backend=backend).sum().backward()
    assert (leaf.grad[:, 3] == 0).all()
    assert leaf.grad.isfinite().all()
    if beta == 0 and softcap is None:
        wanted = logits.softmax(-1) - teacher.softmax(-1)
        wanted[:, 3] = 0
        torch.testing.assert_close(leaf.grad, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_row_and_shows(backend, kind, side):
    teacher, logits = teacher_of(kind), 2 * torch.randn(B, T, V)
    options = {"backend": backend}
    before = fastrl.token_divergence(logits, teacher, **options)
    of_teacher = next(
        x for x in (teacher.hidden, teacher.logits, teacher.logprobs) if x is not None
    )
    column = 2 if teacher.token_ids is None else teacher.token_ids[1, 4, 2]
    if side == "teacher":
        of_teacher[1, 4, 2] = math.nan
    else:
        logits[1, 4, column] = math.nan
    found = fastrl.token_divergence(logits, teacher, **options)
    assert found[1, 4].isnan()
    found[1, 4] = before[1, 4]
    assert torch.equal(found, before)


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
