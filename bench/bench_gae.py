"""Generalized advantage estimation over padded rollouts."""

from __future__ import annotations

import torch
from shapes import TOKENS, Tokens
from timing import Case, Inputs, Provider, pedantic

import fastrl

GAMMA, LAM = 1.0, 0.95


def cases(selection: str) -> list[Case]:
    return [_case(shape, masked) for shape in TOKENS[selection] for masked in (False, True)]


def _case(shape: Tokens, masked: bool) -> Case:
    elements = shape.sequences * shape.tokens
    loop = masked_loop if masked else plain_loop
    return Case(
        op="gae",
        work="GAE with a mask" if masked else "GAE",
        shape=f"{shape.sequences} x {shape.tokens}",
        dtype=torch.float32,
        bytes_moved=4 * elements * 4 + (elements if masked else 0),
        inputs=lambda seed: _inputs(shape, masked, seed),
        providers=[
            _fastrl("cpu"),
            _fastrl("reference"),
            Provider("Python loop", "loop", lambda inputs: loop(**inputs)),
        ],
        error=_error,
    )


def _inputs(shape: Tokens, masked: bool, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    size = (shape.sequences, shape.tokens)
    inputs = {
        "rewards": torch.randn(size, generator=generator),
        "values": torch.randn(size, generator=generator),
    }
    if masked:
        lengths = torch.randint(1, shape.tokens + 1, (shape.sequences, 1), generator=generator)
        inputs["mask"] = torch.arange(shape.tokens) < lengths
    return inputs


def plain_loop(rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One step of tensor arithmetic per token, from the last to the first, as PPO trainers do."""
    advantage = next_value = torch.zeros_like(rewards[:, 0])
    reversed_advantages = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        advantage = delta + GAMMA * LAM * advantage
        next_value = values[:, t]
        reversed_advantages.append(advantage)
    return torch.stack(reversed_advantages[::-1], dim=1)


def masked_loop(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same, carrying value and advantage over masked tokens."""
    active = mask.to(rewards.dtype)
    advantage = next_value = torch.zeros_like(rewards[:, 0])
    reversed_advantages = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        step = delta + GAMMA * LAM * advantage
        next_value = active[:, t] * values[:, t] + (1 - active[:, t]) * next_value
        advantage = active[:, t] * step + (1 - active[:, t]) * advantage
        reversed_advantages.append(advantage)
    return torch.stack(reversed_advantages[::-1], dim=1) * active


def _fastrl(backend: str) -> Provider:
    def run(inputs: Inputs) -> torch.Tensor:
        return fastrl.gae(**inputs, gamma=GAMMA, lam=LAM, backend=backend).advantages

    return Provider(f"fastrl {backend}", f"fastrl {backend}", run)


def _error(answer: torch.Tensor, inputs: Inputs) -> float:
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    truth = masked_loop(**exact) if "mask" in exact else plain_loop(**exact)
    return float((answer - truth).abs().max() / truth.abs().max())


def test_gae(benchmark, case, provider):
    pedantic(benchmark, case, provider)
