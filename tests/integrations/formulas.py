"""Formulas that several trainers share, in float64; gradients come from autograd."""

import torch


def only(mask, x):
    return torch.where(mask.bool(), x.double(), 0.0)


def weighed(mask, x):
    return only(mask, x) * mask


def mean(x, mask):
    return weighed(mask, x).sum() / mask.sum()


def sequence_mean(x, mask):
    return (weighed(mask, x).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]


def logits_of(hidden, weight, bias=None):
    return hidden.double() @ weight.double().T + (0 if bias is None else bias.double())


def chosen(logits, ids):
    """The log-probabilities of these tokens."""
    return logits.double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def clipped(ratio, advantages, low, high):
    """PPO's two losses of a token, without and with the clip of the ratio."""
    return -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)


def kl(d, kind, bound=torch.inf):
    """An estimate from d = logprob - ref_logprob, which k3 bounds."""
    held = d.clamp(-bound, bound)
    return {"k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": torch.exp(-held) - 1 + held}[kind]


def gae(rewards, values, mask, gamma, lam):
    """Advantages, for mask values m between 0 and 1 between the skipped and the counted token."""
    rewards, V, mask = rewards.double(), values.double(), mask.double()
    advantages, (after, trace) = torch.zeros_like(V), torch.zeros(2, len(V)).double()
    for t in reversed(range(V.shape[1])):
        step = rewards[:, t] + gamma * after - V[:, t] + gamma * lam * trace
        trace = mask[:, t] * step + (1 - mask[:, t]) * trace
        after = mask[:, t] * V[:, t] + (1 - mask[:, t]) * after
        advantages[:, t] = trace
    return advantages
