"""The vocabulary kernels of the CUDA backend on the host machine, as functions of tensors."""

import ctypes
from math import inf

import torch

from tests.support.cuda_host import library

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Rows(ctypes.Structure):
    """What `Rows` in tests/cuda/vocabulary.cpp holds."""

    _fields_ = (
        ("type", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("B", "T", "V", "stride_b", "stride_t")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "active", "temperatures")),
        *((name, ctypes.c_double) for name in ("temperature", "logit_scale", "logit_softcap")),
    )


def rows_of(
    logits,
    token_ids,
    active,
    temperatures=None,
    temperature=1.0,
    logit_scale=1.0,
    logit_softcap=0.0,
):
    """Describe logits [B, T, V], which must stay alive, as must the per-token tensors."""
    kind = TYPES[logits.dtype]
    place = (kind, logits.data_ptr(), *logits.shape, logits.stride(0), logits.stride(1))
    heats = None if temperatures is None else temperatures.data_ptr()
    inputs = (token_ids.data_ptr(), active.data_ptr(), heats)
    return Rows(*place, *inputs, temperature, logit_scale, logit_softcap)


def pointers(*tensors):
    """Return an array of their addresses; None is null."""
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    return (ctypes.c_void_p * len(tensors))(*addresses)


def address(x):
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def nan_like(x):
    return torch.full_like(x, float("nan"))


def token_stats(rows, like, *, with_entropy=True, with_sum_sq_probs=True, clusters=True):
    """Return what `token_stats_fwd` does."""
    out = [torch.full(like.shape, float("nan")) for _ in range(6)]
    is_top1 = torch.zeros(like.shape, dtype=torch.bool)
    call = library("vocabulary").token_stats
    flags = [ctypes.c_bool(x) for x in (with_entropy, with_sum_sq_probs, clusters)]
    assert call(ctypes.byref(rows), *flags, pointers(*out), address(is_top1)) == 0
    return (*out[:4], is_top1, *out[4:])


def token_stats_backward(rows, saved, grads, grad):
    """Write the gradient to `grad`, or over the logits where that is None."""
    call = library("vocabulary").token_stats_backward
    assert call(ctypes.byref(rows), pointers(*saved, *grads), address(grad)) == 0


def logits_policy_loss(rows, inputs, kinds, coefficients, grad, *, clusters):
    """Return logprobs and entropy; the gradient goes to `grad`, or over the logits."""
    logprobs, entropy = nan_like(inputs[0]), nan_like(inputs[0])
    call = library("vocabulary").logits_policy_loss
    outputs = (address(logprobs), address(entropy), address(grad))
    numbers = (ctypes.c_int64 * 3)(*kinds), (ctypes.c_double * 11)(*coefficients)
    status = call(
        ctypes.byref(rows), pointers(*inputs), *numbers, ctypes.c_bool(clusters), *outputs
    )
    assert status == 0
    return logprobs, entropy


def coefficients(**given):
    """Return the operators' list; what is not given is absent."""
    names = "clip_low clip_high dual_clip delta sapo_temperature_pos sapo_temperature_neg"
    names += " kl_coef kl_clamp log_ratio_low log_ratio_high entropy_coef"
    absent = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "entropy_coef": 0.0}
    absent |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    values = dict.fromkeys(names.split(), inf) | absent | given
    return list(values.values())


def watch(place, x):
    """Return counts of the loads and stores of each byte of `x` from here on, a row per element."""
    size = x.element_size()
    counts = [torch.zeros(x.numel() * size, dtype=torch.uint8) for _ in range(2)]
    arguments = (ctypes.c_int64(x.numel() * size), *(address(count) for count in counts))
    library("vocabulary").watch(place, address(x), *arguments)
    return [count.view(-1, size) for count in counts]


def stop_watching():
    for place in range(2):
        library("vocabulary").watch(place, None, ctypes.c_int64(0), None, None)
