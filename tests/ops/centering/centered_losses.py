"""Calls with score centering, of which some are compared with reference code in float64."""

import dataclasses
from typing import Any

import torch

import fastrl
from fastrl import Objective, RolloutCorrection, TopKLogprobs

B, T, V, K = 3, 4, 40, 5


def without(o):
    return dataclasses.replace(o, score_centering=False)


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
    "unbounded": (RolloutCorrection(high=torch.inf),),
    "masked": (RolloutCorrection(kind="mask", low=0.7, high=1.3),),
    "filtered": (RolloutCorrection(kind="filter", low=0.7, high=1.3),),
}
