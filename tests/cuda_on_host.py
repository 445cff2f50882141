"""The operators of the CUDA backend on CPU tensors: its kernels in their host build.

Registers them under the CPU key of `fastrl_cuda`, so that `backend="cuda"` goes the whole way from
the public function to the kernel.
"""

import ctypes

import pytest
import torch
from cuda_host import library

import fastrl
from fastrl import library as schemas


def c_argument(x):
    if isinstance(x, torch.Tensor):
        assert x.is_contiguous()
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, float):
        return ctypes.c_float(x)
    return None if x is None else ctypes.c_int64(x)


def call(name, *arguments, program=None):
    """Call a function of tests/cuda/PROGRAM.cpp; tensors go as pointers, None as null."""
    status = getattr(library(program or name), name)(*map(c_argument, arguments))
    assert status == 0, f"{name} returned {status}"


def sequences_of(tokens, cu_seqlens):
    return tokens.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1


def policy_loss_fwd(logprobs, advantages, mask, weights, *others, fewest=0):
    *optional, cu_seqlens, level, ratio, kl_estimator, kl_gradient, coefficients = others
    level = 1 if ratio == 3 else level  # as the operator has it: gmpo is of sequences
    loss, metrics = logprobs.new_empty(()), logprobs.new_empty(len(schemas.METRICS))
    slope = torch.empty_like(logprobs)
    call(
        "policy_loss",
        *(logprobs, advantages, mask, weights, *optional, cu_seqlens, logprobs.numel()),
        *(sequences_of(logprobs, cu_seqlens), level, ratio, kl_estimator, kl_gradient),
        *(torch.tensor(coefficients), fewest, loss, slope, metrics),
    )
    return loss, slope, metrics


def gae_fwd(rewards, values, mask, terminated, truncated, bootstrap, cu_seqlens, gamma, lam):
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    kind = 0 if bootstrap is None else bootstrap.dim()
    call(
        "gae",
        *(rewards, values, mask, terminated, truncated, bootstrap, cu_seqlens, rewards.numel()),
        *(sequences_of(rewards, cu_seqlens), kind, float(gamma), float(lam), advantages, returns),
    )
    return advantages, returns


def group_advantages_fwd(
    rewards, group_ids, group_size, baseline, scale, correction, eps, singleton
):
    result = [torch.empty_like(rewards) for _ in range(3)]
    informative = torch.empty_like(rewards, dtype=torch.bool)
    call(
        "group_advantages",
        *(rewards, group_ids, rewards.numel(), group_size, baseline, scale),
        *(float(correction), float(eps), singleton, *result, informative),
    )
    return *result, informative


@pytest.fixture(scope="module")
def registered():
    """The operators, for as long as the tests of one file run."""
    operators = torch.library.Library("fastrl_cuda", "IMPL")
    for implementation in (policy_loss_fwd, gae_fwd, group_advantages_fwd):
        operators.impl(implementation.__name__, implementation, "CPU")
    yield
    operators._destroy()


@pytest.fixture
def backend(registered, monkeypatch):
    """Takes the place of the fixture of this name in conftest.py."""
    monkeypatch.setitem(fastrl.backend._DEVICES, "cuda", ("cpu",))
    unavailable = fastrl.backend.unavailable
    monkeypatch.setattr(
        fastrl.backend, "unavailable", lambda name: None if name == "cuda" else unavailable(name)
    )
    return "cuda"
