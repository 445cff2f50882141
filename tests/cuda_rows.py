"""Rows of logits for the tests of the CUDA kernels, and what is exactly true of them."""

import torch
from closeness import assert_within_budget
from inputs import make_logits

from fastrl import reference


def make_rows(V, beside, dtype, B=2, T=3):
    """Logits [B, T, V] in a larger tensor, with ids and mask; the last row is not active."""
    token_ids = torch.randint(V, (B, T))
    whole = make_logits(B, T + 1, V + beside, dtype=dtype)
    logits = whole[:, :T, :V]
    lift = torch.full((B, T, 1), 5.0).to(dtype)
    logits.scatter_add_(-1, token_ids[..., None], lift)
    active = torch.ones(B, T, dtype=torch.bool)
    active[-1, -1] = False
    logits[-1, -1] = float("nan")
    return whole, logits, token_ids, active


def exact(logits, token_ids, active, temperature=1.0, logit_scale=1.0, logit_softcap=None):
    options = {"logit_scale": logit_scale, "logit_softcap": logit_softcap}
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()
    return reference.token_stats(
        logits.double(), token_ids, active, temperature=temperature, **options
    )


def gradient(logits, token_ids, active, grads, temperature=1.0, **options):
    """Return the gradient, and the magnitude of what is added up for each element of it."""
    leaf = logits.double()
    leaf[~active] = 0
    leaf.requires_grad_()
    stats = exact(leaf, token_ids, active, temperature, **options)[:3]
    grads = [torch.where(active, grad.double(), 0.0) for grad in grads]
    loss = sum((stat * grad).sum() for stat, grad in zip(stats, grads, strict=True))
    heat = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    slope = torch.where(active[..., None], options.get("logit_scale", 1.0) / heat, 0.0)
    cap = options.get("logit_softcap")
    z = leaf.detach() * slope if cap is None else cap * torch.tanh(leaf * slope * heat / cap) / heat
    logp = torch.where(active[..., None], z.detach(), 0.0).log_softmax(-1)
    parts = grads[0].abs() + grads[2].abs() + grads[1].abs() * (stats[1].detach() + 1)
    size = logp.exp() * (parts[..., None] - grads[1].abs()[..., None] * logp) * (1 - logp)
    size.scatter_add_(-1, token_ids[..., None], grads[0].abs()[..., None])
    return torch.autograd.grad(loss, leaf)[0], size * slope


def assert_gradient(actual, expected, size):
    """In the arithmetic of float32, then rounded once."""
    float32 = torch.finfo(torch.float32).eps
    smallest = torch.finfo(actual.dtype).smallest_normal
    assert_within_budget(actual, expected, ulps=1, atol=16 * float32 * size + smallest)
