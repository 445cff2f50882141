"""A teacher known by log-probabilities of K tokens: its tail, of very little mass on one side."""

import pytest
import torch

import fastrl
from fastrl import Teacher
from tests.ops.teachers.divergences import divergence, logprobs_of, top_events

pytestmark = pytest.mark.kernels
ROWS, V, K = 6, 40, 3
SCALINGS = [
    {},
    {"temperature": 0.1},
    {"temperature": torch.tensor([0.1, 0.2, 0.1, 1.0, 3.0, 0.1]), "softcap": 20.0},
]


@pytest.mark.some_on("triton")
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scaling", SCALINGS, ids=["plain", "temperature", "softcap and per row"])
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_the_tail_gets_its_gradient_however_small_its_share(backend, form, beta, scaling):
    """Also beside log-probabilities of a token of the tail, or of the K, and entropies."""
    logits, ids = torch.randn(ROWS, V), torch.rand(ROWS, V).argsort(-1)[:, :K]
    nats = torch.tensor([12.0, 0.0, 0.0, 110.0, 150.0, 60.0])
    leads = (nats * scaling.get("temperature", 1.0))[:, None]
    logits = logits.scatter_add(-1, ids, leads.expand(ROWS, K))
    log_p = logprobs_of(torch.randn(ROWS, K + 1)).float()[:, :K]
    tokens = ids[:, 0].clone()
    tokens[::2] = torch.tensor([min({0, 1, 2, 3} - set(row.tolist())) for row in ids])[::2]
    double = logits.double().requires_grad_()
    log_q = logprobs_of(double, **scaling)
    exact = divergence(*top_events(log_q, log_p.double(), ids), beta)
    entropy = -(log_q.exp() * log_q).sum(-1)
    chosen = log_q.gather(-1, tokens[:, None])[:, 0]
    options = {"outputs": ("logprobs", "entropy", "divergence"), "backend": backend}
    options["teacher"] = Teacher.from_top_k(ids, log_p, beta=beta)
    options |= {"logit_softcap": scaling.get("softcap")}
    options |= {name: x for name, x in scaling.items() if name == "temperature"}
    for beside in (False, True):
        if form == "logits":
            leaf = logits.clone().requires_grad_()
            stats = fastrl.token_stats(leaf, tokens, **options)
        else:  # a head of unit vectors: its gradient is that of the logits
            leaf = logits.T.clone().requires_grad_()
            stats = fastrl.linear_token_stats(torch.eye(ROWS), leaf, tokens, **options)
        found = stats.divergence.sum() + (0.5 * stats.logprobs + stats.entropy).sum() * beside
        wanted = exact.sum() + (0.5 * chosen + entropy).sum() * beside
        assert abs(found.item() - wanted.item()) <= 2e-5 * (abs(wanted.item()) + 1)
        (gradient,) = torch.autograd.grad(wanted, double, retain_graph=True)
        found.backward()
        of_logits = leaf.grad if form == "logits" else leaf.grad.T
        error = (of_logits.double() - gradient).abs()
        assert error.max() <= 5e-5 * gradient.abs().max()
        if beta == 0 and not beside:  # of the others' softmax, which is as exact as any
            others = torch.ones(ROWS, V).scatter(-1, ids, 0.0)
            largest = (others * gradient).abs().amax(-1, keepdim=True)
            assert (error * others <= 5e-5 * largest).all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_tail_is_what_float64_logprobs_leave(backend, beta, dtype):
    """Also beside float32 logits, and as the rounding error of 1 in float64 if nothing is left."""
    left = torch.tensor([1e-4, 1e-6, 1e-7, 1e-8, 1e-10, 1e-13, 0.0], dtype=torch.float64)
    log_p = torch.stack([torch.full_like(left, 0.6), 0.4 - left], -1).log()
    ids = torch.tensor([[1, 3]]).expand(len(left), 2)
    logits = torch.tensor([[0.0, 5.0, 0.0, 4.0]], dtype=torch.float64).expand(len(left), 4)
    events, wanted = top_events(logits.log_softmax(-1), log_p, ids)
    mass = (1 - log_p.exp().sum(-1)).clamp(min=torch.finfo(torch.float64).eps)
    wanted = torch.cat([wanted[:, :2], mass.log()[:, None]], -1)
    teacher = Teacher.from_top_k(ids, log_p, beta=beta)
    if backend != "reference" and dtype == torch.float64:
        backend = "auto"  # which computes float64
    found = fastrl.token_divergence(logits.to(dtype), teacher, backend=backend)
    exact = divergence(events, wanted, beta)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
