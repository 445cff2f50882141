"""Score centering in float64, written out over the whole vocabulary, and calls to compare it with.

Beside the expected score, a loss is the one without score centering.
"""

import dataclasses
from typing import Any

import torch

import fastrl
from fastrl import Objective, RolloutCorrection, TopKLogprobs

B, T, V, K, WIDTH = 3, 4, 40, 5, 6
LEAST_TAIL = 1e-6


def weight_at(ratio, o, old=None):
    """The weight of tokens with these ratios p / q."""
    weight, x = torch.ones_like(ratio), ratio.log()
    if old is not None and o.surrogate == "cispo":
        c = o.arguments.coefficients
        within = x.clamp(-c.log_ratio_low, c.log_ratio_high).exp()
        weight = weight * within.clamp(max(0.0, 1 - c.clip_low), 1 + c.clip_high)
    estimates = {"ratio": ratio, "k1": -x, "k2": x**2 / 2, "k3": ratio - 1 - x}
    estimates["reverse-k3"] = 1 / ratio - 1 + x
    for c in o.rollout_corrections:
        if c.level != "token":
            continue
        if c.kind == "truncate":
            weight = weight * ratio.clamp(c.low, c.high)
            continue
        bounded = estimates[c.estimator]
        kept = (bounded >= c.low) & (bounded <= c.high)
        weight = weight * kept * (ratio if c.kind == "mask" else 1)
    return weight


def expected_score(log_p, top, o, old=None):
    """C of rows `[B, T, V]`, with the gradient of sum_v q w log p over the whole vocabulary."""
    ids, log_q = (x.view(*log_p.shape[:-1], -1) for x in top)
    given = ids >= 0
    q = torch.where(given, log_q.double().exp(), 0.0)
    p = log_p.detach().exp()
    # the tokens of H, of which those that are not given fall into a column that is cut off
    columns = torch.where(given, ids, log_p.shape[-1])
    wide = torch.zeros(*log_p.shape[:-1], log_p.shape[-1] + 1, dtype=torch.float64)
    of_sampler = wide.scatter(-1, columns, q)[..., :-1]
    is_head = wide.scatter(-1, columns, 1.0)[..., :-1] > 0
    tail_p = torch.where(is_head, 0.0, p).sum(-1, keepdim=True).clamp(min=LEAST_TAIL)
    rho = (1 - q.sum(-1, keepdim=True)).clamp(min=0) / tail_p
    of_sampler = torch.where(is_head, of_sampler, rho * p)
    possible = (of_sampler > 0) & (p > 0)
    ratio = torch.where(possible, p / torch.where(possible, of_sampler, 1.0), 1.0)
    mass = torch.where(possible, of_sampler * weight_at(ratio, o, old), 0.0)
    # m is p where q is 0 and the weight p / q
    unbounded = [c for c in o.sampler_weights if c.kind == "truncate" and c.high == torch.inf]
    mass = torch.where((of_sampler == 0) & (p > 0) & bool(unbounded), p, mass)
    finite = torch.where(p > 0, log_p, 0.0)
    whole = (mass * finite).sum(-1)
    alpha = torch.where(rho > 0, rho * weight_at(1 / rho, o, old), float(bool(unbounded)))
    value = (torch.where(is_head, mass - alpha * p, 0.0) * finite).sum(-1).detach()
    return whole - whole.detach() + value


def without(o):
    return dataclasses.replace(o, score_centering=False)


def log_p_of(logits, options):
    z = logits * options.get("logit_scale", 1.0)
    cap = options.get("logit_softcap")
    z = z if cap is None else cap * (z / cap).tanh()
    temperature = torch.as_tensor(options.get("temperature", 1.0)).double()
    return (z / (temperature[..., None] if temperature.dim() else temperature)).log_softmax(-1)


def exact_loss(logits, given, top, weights, excluded=0.0, **more):
    """The loss in float64 of logits `[B, T, V]`; `weights` of tokens multiply their C."""
    o, options = given["objective"], {**given, **more}
    options |= {"objective": without(o), "backend": "reference"}
    options = {name: x for name, x in options.items() if name not in ("inplace", "metrics")}
    rest = fastrl.logits_policy_loss(logits + excluded, **options).loss
    log_p = log_p_of(logits, options) + excluded
    log_p = log_p.log_softmax(-1)
    score = expected_score(log_p, top, o, given.get("old_logprobs"))
    mask = given["mask"].bool()
    term = torch.where(mask & (weights != 0), score, 0.0) * torch.where(mask, weights, 0.0)
    return rest + term.sum(), term.sum()


def sampler_of(logits, ids=None, noise=0.5, count=K):
    """The sampler's most likely tokens: of a distribution near that of logits `[..., V]`."""
    log_q = (logits.double() + noise * torch.randn(logits.shape)).log_softmax(-1)
    values, ids = log_q.topk(count, -1)
    return TopKLogprobs(ids, values.float()), log_q


def drawn(o, *, dtype=torch.float32, count=K):
    """Logits, and what an objective takes beside them; tokens are masked, and rows not full."""
    logits = (1.5 * torch.randn(B, T, V)).to(dtype)
    top, log_q = sampler_of(logits, count=count)
    ids = torch.distributions.Categorical(logits=log_q).sample()
    rollout = log_q.gather(-1, ids[..., None])[..., 0].float()
    top.token_ids[0, 1, 2:] = top.token_ids[1, 2] = -1
    top.logprobs[0, 1, 2:] = torch.nan
    given: dict[str, Any] = {"token_ids": ids, "advantages": torch.randn(B), "objective": o}
    given["mask"] = torch.rand(B, T) > 0.2
    if o.rollout_corrections:
        given["rollout_logprobs"] = rollout
    return logits, given, top, rollout


def factors(given, o, **options):
    """What multiplies C: the weights of an aggregation, advantages and `policy_weights`."""
    mask, a = given["mask"].bool(), given["advantages"].double()
    aggregation = fastrl.token_weights(mask, aggregation=o.aggregation, **options).double()
    result = aggregation * (a if a.dim() == 2 else a[:, None])
    own = given.get("policy_weights")
    return result if own is None else result * (own if own.dim() == 2 else own[:, None])


def centered(surrogate="reinforce", *corrections, **fields):
    """An objective with score centering."""
    correction = corrections or None
    return Objective.preset(
        surrogate, score_centering=True, rollout_correction=correction, **fields
    )


WEIGHTS = {
    "none": (),
    "truncated": (RolloutCorrection(low=0.7, high=1.3),),
    "truncated above": (RolloutCorrection(high=1.2),),
    "unbounded": (RolloutCorrection(high=torch.inf),),
    "bounded below": (RolloutCorrection(low=0.8, high=torch.inf),),
    "masked": (RolloutCorrection(kind="mask", low=0.7, high=1.3),),
    "filtered": (RolloutCorrection(kind="filter", low=0.7, high=1.3),),
    "filtered by k1": (RolloutCorrection(kind="filter", estimator="k1", low=-0.3, high=0.2),),
    "filtered by k2": (RolloutCorrection(kind="filter", estimator="k2", high=0.05),),
    "filtered by k3": (RolloutCorrection(kind="filter", estimator="k3", high=0.05),),
    "filtered by reverse k3": (
        RolloutCorrection(kind="filter", estimator="reverse-k3", high=0.05),
    ),
    "truncated and filtered": (
        RolloutCorrection(low=0.7, high=1.3),
        RolloutCorrection(kind="filter", low=0.6, high=1.5),
    ),
}
