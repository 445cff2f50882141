"""The policy loss where each token was sampled from a part of the vocabulary, top-p or top-k."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import fastrl
from fastrl.backend import Backend
from fastrl.bench.case import Case, Inputs, Size
from fastrl.bench.cases.linear import linear_case, loss
from fastrl.bench.error import ROLLOUT, Work, clipped, logprobs_of, parts
from fastrl.bench.inputs import Source, linear_inputs
from fastrl.bench.peers import Participants

KEPT = r"[1-9]\d* kept"


def loss_of_kept(size: Size, step: str, who: Participants) -> Case:
    """The clipped loss on the tokens that the sampler kept; eager: a softmax with -inf."""
    count = int(size.variant.split()[0])

    def ours(inputs: Inputs, backend: Backend) -> Tensor:
        return loss(inputs, kept=inputs["kept"], backend=backend)

    work = Work(_values, (*ROLLOUT, "kept_ids"), mean=True)
    inputs = functools.partial(_inputs, count)
    case = linear_case(size, step, who, who.fastrl(ours), work, inputs)
    # a row needs only the rows of the head that it kept
    providers = [one for one in case.providers if one.kind != "floor"]
    return case._replace(flops=case.flops * count // case.shape["vocabulary"], providers=providers)


def _values(logits: Tensor, tokens: Inputs) -> tuple[Tensor, ...]:
    logprobs = logprobs_of(_alone(logits, tokens["kept_ids"]), tokens["token_ids"])
    return (clipped(logprobs, tokens),)


def _alone(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the logits with -inf for all tokens but these."""
    banned = torch.ones_like(logits, dtype=torch.bool).scatter(-1, ids, False)
    return logits.masked_fill(banned, -torch.inf)


def _inputs(count: int, size: Size, device: torch.device, seed: int) -> Inputs:
    """Random tokens and each row's own, so that a row of the head is seldom read twice."""
    inputs = linear_inputs(size, device, seed)
    ids, source = inputs["token_ids"], Source(device, seed + 1000)
    kept = source.integers(len(inputs["weight"]), *ids.shape, count)
    kept[..., 0] = ids
    lists = [[*dict.fromkeys(row)] for row in kept.flatten(0, 1).tolist()]
    sets = fastrl.KeptTokens.from_lists(lists, device=device)
    head, logprobs = inputs["weight"].float().T, []
    for part in parts(inputs):
        logits = _alone(inputs["hidden"][part].float() @ head, kept[part])
        logprobs.append(logprobs_of(logits, ids[part]).flatten())
    old = torch.cat(logprobs).view(ids.shape) + 0.1 * source.normal(*ids.shape)
    return inputs | {"kept_ids": kept, "kept": sets, "old_logprobs": old}
