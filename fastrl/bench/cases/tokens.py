"""Operators on one number per token or answer, in float32."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.backend import Backend
from fastrl.bench import libraries
from fastrl.bench.case import BOTH, FORWARD, Case, Inputs, Provider, Size
from fastrl.bench.cases.vocabulary import OBJECTIVE, copy_floor
from fastrl.bench.error import clipped, double, masked_mean
from fastrl.bench.inputs import Source, sequences
from fastrl.bench.peers import Participants

GAMMA, LAM = 1.0, 0.95
EPS = 1e-4  # added to the deviation of a group
LONGEST_LOOP = 4096  # tokens that a loop of torch calls takes in bearable time
CHECKED_TOKENS = 2**18
LENGTH = r"[1-9]\d* tokens each"
GROUPS = r"groups of [1-9]\d*( by id)?"
SEQUENCE_LEVEL = "sequence level"
LEVEL_AND_LENGTH = f"({SEQUENCE_LEVEL}, )?{LENGTH}"


def policy_loss(size: Size, step: str, who: Participants) -> Case:
    """The clipped loss from log-probabilities, whose gradient fastrl computes in the forward."""
    of_sequences = SEQUENCE_LEVEL in size.variant
    objective = dataclasses.replace(OBJECTIVE, level="sequence" if of_sequences else "token")
    names = ("logprobs", "old_logprobs", "advantages", "mask")
    B, T = _sequences(size)

    def ours(inputs: Inputs, backend: Backend) -> Tensor:
        return fastrl.policy_loss(
            inputs["logprobs"], inputs["advantages"][:, 0], inputs["mask"],
            old_logprobs=inputs["old_logprobs"], objective=objective, backend=backend,
        ).loss  # fmt: skip

    def eager(logprobs: Tensor, *rest: Tensor, upcast: bool = False) -> Tensor:
        tokens = dict(zip(names[1:], rest, strict=True))
        if of_sequences:
            mask, old = tokens["mask"], tokens["old_logprobs"]
            log_ratio = ((logprobs - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
            logprobs, tokens["old_logprobs"] = log_ratio, torch.zeros_like(log_ratio)
        return masked_mean(clipped(logprobs, tokens), tokens)

    def inputs(seed: int) -> Inputs:
        source = Source(who.device, seed)
        logprobs = -4 * source.uniform(B, T)
        old, advantages = logprobs + 0.1 * source.normal(B, T), source.normal(B, 1)
        return dict(zip(names, (logprobs, old, advantages, _mask(source, B, T)), strict=True))

    def error(answer: Any, inputs: Inputs, step: str = step) -> float:
        exact = {name: double(x) for name, x in inputs.items()}
        leaf = exact["logprobs"].requires_grad_()
        truth = eager(leaf, *(exact[name] for name in names[1:]))
        if step == FORWARD:
            return float((answer - truth).detach().abs() / truth.detach().abs().clamp(min=1))
        (truth,) = torch.autograd.grad(truth, leaf)
        return _relative(answer[0], truth)

    return _case(
        size,
        step,
        [*who.fastrl(ours), *who.torch(eager, names, torch.float32)],
        copied=("logprobs", "old_logprobs"),
        shape={"sequences": B, "tokens": T},
        inputs=inputs,
        error=error,
        output_error=partial(error, step=FORWARD) if step == BOTH else None,
        leaves=("logprobs",),
        bytes_moved=(9 if step == FORWARD else 13) * B * T,
    )


def gae(size: Size, step: str, who: Participants) -> Case:
    """Generalized advantage estimation of padded rollouts."""
    B, T = _sequences(size)

    def ours(inputs: Inputs, backend: Backend) -> Tensor:
        return fastrl.gae(**inputs, gamma=GAMMA, lam=LAM, backend=backend).advantages

    def inputs(seed: int) -> Inputs:
        source = Source(who.device, seed)
        found = {name: source.normal(B, T) for name in ("rewards", "values")}
        return found | {"mask": _mask(source, B, T)}

    quick = T <= LONGEST_LOOP
    kernels = tuple(name for name in who.backends if quick or name != "reference")
    providers = who._replace(backends=kernels).fastrl(ours)
    if quick and "eager" in who.peers:
        providers.append(Provider("eager", "eager", _gae_loop))
    return _case(
        size,
        step,
        [*providers, *who.others(libraries.gae(GAMMA, LAM))],
        copied=("rewards", "values"),
        shape={"sequences": B, "tokens": T},
        inputs=inputs,
        error=_gae_error,
        bytes_moved=17 * B * T,  # advantages and returns are written
    )


def _gae_loop(inputs: Inputs) -> Tensor:
    """One step of tensor arithmetic per token, from the last to the first, as PPO trainers do."""
    rewards, values = inputs["rewards"], inputs["values"]
    active = inputs["mask"].to(rewards.dtype)
    advantage = following = torch.zeros_like(rewards[:, 0])
    found = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * following - values[:, t]
        following = active[:, t] * values[:, t]
        advantage = active[:, t] * (delta + GAMMA * LAM * advantage)
        found.append(advantage)
    return torch.stack(found[::-1], dim=1)


def _gae_error(answer: Tensor, inputs: Inputs) -> float:
    """Of some rows, the first and the last among them, one number at a time."""
    if not answer.isfinite().all():
        return math.nan
    count = max(1, CHECKED_TOKENS // answer.shape[1])
    rows = torch.linspace(0, len(answer) - 1, count).long().unique()
    names, truth = ("rewards", "values", "mask"), []
    for lists in zip(*(inputs[name].cpu()[rows].tolist() for name in names), strict=True):
        advantage = following = 0.0
        row = []
        for reward, value, active in zip(*(one[::-1] for one in lists), strict=True):
            if active:
                advantage = reward + GAMMA * following - value + GAMMA * LAM * advantage
                following = value
            row.append(advantage if active else 0.0)
        truth.append(row[::-1])
    return _relative(answer.cpu()[rows], torch.tensor(truth, dtype=torch.float64))


def group_advantages(size: Size, step: str, who: Participants) -> Case:
    """Rewards to advantages within groups; ``rows``: all answers."""
    named = re.search(r"groups of (\d+)", size.variant)
    group = int(named[1]) if named else 8
    by_id = size.variant.endswith("by id")
    prompts = max(1, size.rows // group)

    def ours(inputs: Inputs, backend: Backend) -> Tensor:
        return fastrl.group_advantages(**inputs, eps=EPS, backend=backend).advantages

    def inputs(seed: int) -> Inputs:
        source = Source(who.device, seed)
        rewards = source.uniform(prompts * group)
        if not by_id:
            return {"rewards": rewards, "group_size": group}
        order = source.uniform(prompts * group).argsort()
        ids = torch.arange(prompts, device=who.device).repeat_interleave(group)
        return {"rewards": rewards, "group_ids": ids[order]}

    def error(answer: Tensor, inputs: Inputs) -> float:
        return _relative(answer, eager(inputs | {"rewards": inputs["rewards"].double()}))

    eager = _lists if by_id else _views
    providers = who.fastrl(ours)
    if "eager" in who.peers:
        providers.append(Provider("eager", "eager", eager))
    return _case(
        size,
        step,
        providers,
        copied=("rewards",),
        shape={"prompts": prompts, "group_size": group},
        inputs=inputs,
        error=error,
        bytes_moved=(25 if by_id else 17) * prompts * group,
    )


def _views(inputs: Inputs) -> Tensor:
    groups: Tensor = inputs["rewards"].view(-1, inputs["group_size"])
    centered = groups - groups.mean(-1, keepdim=True)
    return (centered / (groups.std(-1, keepdim=True) + EPS)).flatten()


def _lists(inputs: Inputs) -> Tensor:
    """A dictionary of lists, as trainers group answers that come in any order."""
    rewards: Tensor = inputs["rewards"]
    members: dict[int, list[int]] = {}
    for place, one in enumerate(inputs["group_ids"].tolist()):
        members.setdefault(one, []).append(place)
    advantages = torch.empty_like(rewards)
    for places in members.values():
        group = rewards[places]
        advantages[places] = (group - group.mean()) / (group.std() + EPS)
    return advantages


def _case(
    size: Size, step: str, providers: list[Provider], copied: tuple[str, ...], **fields: Any
) -> Case:
    """Return a case in float32 with a copy of these inputs."""
    providers = [*providers, copy_floor(step, *copied)]
    return Case(size._replace(dtype=torch.float32), step, providers=providers, **fields)


def _sequences(size: Size) -> tuple[int, int]:
    named = re.search(r"(\d+) tokens each", size.variant)
    if named is None:
        return sequences(size)
    tokens = min(int(named[1]), size.rows)
    return size.rows // tokens, tokens


def _mask(source: Source, B: int, T: int) -> Tensor:
    """Completions of uneven lengths, a quarter of the tokens padding at most."""
    lengths = T - source.integers(max(1, T // 4), B, 1)
    return torch.arange(T, device=source.device) < lengths


def _relative(answer: Tensor, truth: Tensor) -> float:
    return float((answer - truth).abs().max() / truth.abs().max())
