"""Divergences of log-probabilities in float64, by their definition."""

import math

import torch

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def kl(log_p, log_q):
    return torch.where(log_p == -math.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(-1)


def divergence(log_q, log_p, beta):
    """Of log-probabilities in float64."""
    if beta in (0, 1):
        return kl(log_q, log_p) if beta else kl(log_p, log_q)
    mixture = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
    return beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture)


def logprobs_of(logits, *, temperature=1.0, scale=1.0, softcap=None):
    z = logits.double() * scale
    if softcap is not None:
        z = torch.where(z == -math.inf, z, softcap * torch.tanh(z / softcap))
    heat = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    return (z / heat).log_softmax(-1)


def top_events(log_q, log_p, ids):
    """Log-probabilities of the tokens `ids` and of all others, of both; `log_p` is of `ids`."""
    others = torch.ones_like(log_q, dtype=torch.bool).scatter(-1, ids, False)
    tail = torch.where(others, log_q, -math.inf).logsumexp(-1, keepdim=True)
    events = torch.cat([log_q.gather(-1, ids), tail], -1)
    return events, torch.cat([log_p, (-log_p.exp().sum(-1, keepdim=True)).log1p()], -1)
