"""The operators of the CUDA backend on CPU tensors: its kernels in their host build.

Registers them under the CPU key of `fastrl_cuda`, so that `backend="cuda"` goes the whole way from
the public function to the kernel.
"""

import ctypes

import pytest
import torch

import fastrl
from fastrl import library as schemas
from tests.support import cuda_vocabulary as vocabulary
from tests.support.cuda_host import library


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


def policy_loss_fwd(logprobs, advantages, mask, weights, *others, fewest=0, ranks=1):
    *optional, cu_seqlens, level, ratio, kl_estimator, kl_gradient, coefficients = others
    level = 1 if ratio == 3 else level  # as the operator has it: gmpo is of sequences
    loss, metrics = logprobs.new_empty(()), logprobs.new_empty(len(schemas.METRICS))
    slope = torch.empty_like(logprobs)
    call(
        "policy_loss",
        *(logprobs, advantages, mask, weights, *optional, cu_seqlens, logprobs.numel()),
        *(sequences_of(logprobs, cu_seqlens), level, ratio, kl_estimator, kl_gradient),
        *(torch.tensor(coefficients), fewest, ranks, loss, slope, metrics),
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


def token_stats_fwd(logits, token_ids, active, *others):
    *scaling, with_entropy, with_sum_sq_probs = others
    rows = vocabulary.rows_of(logits, token_ids, active, *scaling)
    wanted = {"with_entropy": with_entropy, "with_sum_sq_probs": with_sum_sq_probs}
    return vocabulary.token_stats(rows, token_ids, **wanted)


def token_stats_bwd_(logits, token_ids, active, *others, grad=None):
    *scaling, row_max, log_sum, entropy, grad_logprobs, grad_entropy, grad_logsumexp = others
    rows = vocabulary.rows_of(logits, token_ids, active, *scaling)
    saved, grads = (row_max, log_sum, entropy), (grad_logprobs, grad_entropy, grad_logsumexp)
    vocabulary.token_stats_backward(rows, saved, grads, grad)


def token_stats_bwd(logits, *others):
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    token_stats_bwd_(logits, *others, grad=grad)
    return grad


def logits_policy_loss_fwd_(logits, token_ids, active, *others, grad=None):
    scaling, inputs, kinds, coefficients = others[:4], others[4:10], others[10:13], others[13]
    rows = vocabulary.rows_of(logits, token_ids, active, *scaling)
    return vocabulary.logits_policy_loss(rows, inputs, kinds, coefficients, grad, clusters=True)


def logits_policy_loss_fwd(logits, *others):
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return *logits_policy_loss_fwd_(logits, *others, grad=grad), grad


@pytest.fixture(scope="module")
def registered():
    """The operators, for as long as the tests of one file run."""
    operators = torch.library.Library("fastrl_cuda", "IMPL")
    small = (policy_loss_fwd, gae_fwd, group_advantages_fwd)
    stats = (token_stats_fwd, token_stats_bwd, token_stats_bwd_)
    for implementation in (*small, *stats, logits_policy_loss_fwd, logits_policy_loss_fwd_):
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
