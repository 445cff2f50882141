"""Tensors that are not dense or spread over ranks, as every tensor argument of every function."""

import inspect
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_bad_input import refuses
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

import fastrl
from fastrl import Objective, RolloutCorrection

ones, zeros, two = torch.ones, torch.zeros, torch.tensor([0, 2, 6])
FUNCTIONS = {name: getattr(fastrl, name) for name in fastrl.__all__}
FUNCTIONS = {name: call for name, call in FUNCTIONS.items() if inspect.isfunction(call)}
#: Six packed tokens in two sequences.
TOKENS = {
    "logits": zeros(6, 5),
    "hidden": zeros(6, 4),
    "weight": zeros(5, 4),
    "bias": zeros(5),
    "token_ids": zeros(6).long(),
    "cu_seqlens": two,
    "group_ids": two[:2],
    "teacher": fastrl.Teacher.from_logits(zeros(6, 5)),
}
METRICS = fastrl.policy_loss(zeros(1, 1), ones(1), ones(1, 1)).metrics
#: What an argument needs beside it.
NEEDS = {
    "old_values": {"clip": 0.2},
    "rollout_logprobs": {"objective": Objective(rollout_correction=RolloutCorrection())},
    "group_ids": {"objective": Objective(aggregation="prompt-mean"), "aggregation": "prompt-mean"},
    "metrics": {"metrics": METRICS},
}


def on_one_rank(x):
    return DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()])


KINDS = {
    "a DTensor": on_one_rank,
    "Tensor (torch.sparse_coo)": torch.Tensor.to_sparse,
    "Tensor (nested)": lambda x: torch.nested.nested_tensor([x]),
    "Tensor (torch.quint8)": lambda x: torch.quantize_per_tensor(x.float(), 1.0, 0, torch.quint8),
    "Tensor (torch._mkldnn)": lambda x: x.float().to_mkldnn(),
    "MaskedTensor": lambda x: torch.masked.masked_tensor(x, torch.ones_like(x).bool()),
}
ARGUMENTS = [
    (name, argument)
    for name, function in FUNCTIONS.items()
    for argument, parameter in inspect.signature(function).parameters.items()
    if re.search("Tensor|Parts|Normalizer|Lora", str(parameter.annotation))
]
assert len(ARGUMENTS) >= 90
HEAD = ("weight", "bias", "lora")  # may be DTensors, whole or split
CASES = [(*row, k) for row in ARGUMENTS for k in KINDS if k != "a DTensor" or row[1] not in HEAD]


def given(name, argument):
    """Arguments of the function with which `argument` is looked at."""
    needed = NEEDS.get(argument, {})
    if name == "group_advantages":
        return {"rewards": ones(6), "mask": ones(6), "group_ids": torch.arange(6)}
    result = {}
    for other, parameter in inspect.signature(FUNCTIONS[name]).parameters.items():
        if other in needed:
            result[other] = needed[other]
        elif parameter.default is parameter.empty or other in (argument, "cu_seqlens"):
            result[other] = TOKENS.get(other, ones(6))
        if other == "aggregation" and other not in needed:
            result[other] = "token-mean"
    if "objective" in result and "aggregation" in result:
        del result["objective"]
    return result


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument", "kind"), CASES)
def test_a_tensor_that_is_not_dense(name, argument, kind):
    arguments, named = given(name, argument), argument
    if argument == "lora":
        arguments[argument], named = (KINDS[kind](zeros(2, 4)), zeros(5, 2), 1.0), "lora[0]"
    elif argument == "metrics":
        changed = (
            METRICS["kl_old"]
            if "sparse" in kind or "quint8" in kind or "DTensor" in kind
            else METRICS["kl_old"][None]
        )
        arguments[argument], named = (
            {**METRICS, "kl_old": KINDS[kind](changed)},
            "metrics['kl_old']",
        )
    else:
        arguments[argument] = KINDS[kind](arguments[argument])
    wanted = "plain" if kind == "a DTensor" else "dense"
    message = f"{named} must be a {wanted} tensor, ... got {kind}"
    refuses(lambda: FUNCTIONS[name](**arguments), TypeError, message)


#: What is no tensor of the kind that an argument takes: its words.
OTHERS = {
    "a list": (torch.Tensor.tolist, TypeError, "must be a tensor, got list"),
    "on meta": (lambda x: x.to("meta"), ValueError, "must be on cpu like"),
    "complex": (lambda x: x.to(torch.complex64), TypeError, "must be ... complex64"),
    "of integers": (torch.Tensor.long, TypeError, "must be a floating-point tensor"),
}
TAKE_INTEGERS = ("mask", "token_ids", "cu_seqlens", "group_ids", "terminated", "truncated")
OF_TENSORS = [
    (name, argument, kind)
    for name, argument in ARGUMENTS
    for kind in OTHERS
    if str(inspect.signature(FUNCTIONS[name]).parameters[argument].annotation).startswith("Tensor")
    if not (kind == "on meta" and argument == next(iter(given(name, argument))))
    if not (kind == "of integers" and argument in TAKE_INTEGERS)
]


@pytest.mark.parametrize(("name", "argument", "kind"), OF_TENSORS)
def test_what_is_no_such_tensor(name, argument, kind):
    arguments = given(name, argument)
    change, error, message = OTHERS[kind]
    arguments[argument] = change(arguments[argument])
    refuses(lambda: FUNCTIONS[name](**arguments), error, f"{argument} {message}")


def test_an_array_as_backend():
    """A comparison of it with a name is an array."""
    tried = 0
    for name, function in FUNCTIONS.items():
        if "backend" in inspect.signature(function).parameters:
            arguments = {**given(name, "mask"), "backend": np.array(["auto", "cpu"])}
            message = "backend must be a string, got ndarray"
            refuses(lambda f=function, a=arguments: f(**a), TypeError, message)
            tried += 1
    assert tried >= 15
