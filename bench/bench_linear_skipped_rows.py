"""The linear form where most rows have no gradient: masked, or with advantage 0."""

from __future__ import annotations

from collections.abc import Callable

import torch
from bench_linear import fastrl_provider, gradients_error, linear_inputs
from shapes import LINEAR, Linear
from timing import Case, Inputs, Provider, pedantic

MASKED = "a quarter of the rows active"
WITHOUT_ADVANTAGE = "every advantage 0"


def cases(selection: str) -> list[Case]:
    return [make(shape) for shape in LINEAR[selection] for make in (_masked, _without_advantage)]


def _case(shape: Linear, work: str, change: Callable[[Inputs], Inputs], other: Provider) -> Case:
    rows = shape.sequences * shape.tokens
    return Case(
        op="linear_policy_loss",
        work=work,
        shape=f"{rows} x {shape.hidden} x {shape.vocab}",
        dtype=torch.float32,
        bytes_moved=2 * (rows + shape.vocab) * shape.hidden * 4,
        inputs=lambda seed: change(linear_inputs(shape, torch.float32, seed)),
        providers=[fastrl_provider("cpu"), other],
        error=gradients_error,
    )


def _masked(shape: Linear) -> Case:
    def change(inputs: Inputs) -> Inputs:
        mask = torch.zeros_like(inputs["mask"])
        mask[:, ::4] = 1
        return inputs | {"mask": mask}

    def gather(inputs: Inputs) -> Inputs:
        per_token = ("hidden", "token_ids", "advantages", "old_logprobs", "mask")
        return {n: x[:, ::4].contiguous() if n in per_token else x for n, x in inputs.items()}

    alone = Provider("those rows alone", "same rows", fastrl_provider("cpu").run, gather)
    return _case(shape, MASKED, change, alone)


def _without_advantage(shape: Linear) -> Case:
    def change(inputs: Inputs) -> Inputs:
        advantages = inputs["advantages"]
        return inputs | {"advantages": torch.zeros_like(advantages), "others": advantages}

    def restore(inputs: Inputs) -> Inputs:
        return inputs | {"advantages": inputs["others"]}

    dense = Provider("with none 0", "all rows", fastrl_provider("cpu").run, restore)
    return _case(shape, WITHOUT_ADVANTAGE, change, dense)


def test_linear_skipped_rows(benchmark, case, provider):
    pedantic(benchmark, case, provider)
