"""Rewards to advantages within groups: consecutive groups, and groups by ids in any order."""

from __future__ import annotations

import torch
from shapes import GROUPS, Groups
from timing import Case, Inputs, Provider, pedantic

import fastrl

EPS = 1e-4


def cases(selection: str) -> list[Case]:
    return [_case(shape, by_id) for shape in GROUPS[selection] for by_id in (False, True)]


def _case(shape: Groups, by_id: bool) -> Case:
    baselines = [Provider("eager", "eager", eager)]
    if by_id:
        baselines = [Provider("Python loop", "loop", group_loop)]
    return Case(
        op="group_advantages",
        work="groups by id" if by_id else "consecutive groups",
        shape=f"{shape.prompts} x {shape.size}",
        dtype=torch.float32,
        bytes_moved=shape.prompts * shape.size * (16 if by_id else 8),
        inputs=lambda seed: _inputs(shape, by_id, seed),
        providers=[_fastrl("cpu"), _fastrl("reference"), *baselines],
        error=_error,
    )


def _inputs(shape: Groups, by_id: bool, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    count = shape.prompts * shape.size
    rewards = torch.rand(count, generator=generator)
    if not by_id:
        return {"rewards": rewards, "group_size": shape.size}
    ids = torch.arange(shape.prompts).repeat_interleave(shape.size)
    return {"rewards": rewards, "group_ids": ids[torch.randperm(count, generator=generator)]}


def eager(inputs: Inputs) -> torch.Tensor:
    """What trainers do with consecutive groups: a view [prompts, size]."""
    groups = inputs["rewards"].view(-1, inputs["group_size"])
    centered = groups - groups.mean(-1, keepdim=True)
    return (centered / (groups.std(-1, keepdim=True) + EPS)).flatten()


def group_loop(inputs: Inputs) -> torch.Tensor:
    """What trainers do with groups in any order: a dictionary of lists, mean and std per group."""
    rewards, members = inputs["rewards"], {}
    for place, group in enumerate(inputs["group_ids"].tolist()):
        members.setdefault(group, []).append(place)
    advantages = torch.empty_like(rewards)
    for places in members.values():
        group = rewards[places]
        advantages[places] = (group - group.mean()) / (group.std() + EPS)
    return advantages


def _fastrl(backend: str) -> Provider:
    def run(inputs: Inputs) -> torch.Tensor:
        return fastrl.group_advantages(**inputs, eps=EPS, backend=backend).advantages

    return Provider(f"fastrl {backend}", f"fastrl {backend}", run)


def _error(answer: torch.Tensor, inputs: Inputs) -> float:
    exact = {**inputs, "rewards": inputs["rewards"].double()}
    truth = group_loop(exact) if "group_ids" in exact else eager(exact)
    return float((answer - truth).abs().max() / truth.abs().max())


def test_group_advantages(benchmark, case, provider):
    pedantic(benchmark, case, provider)
