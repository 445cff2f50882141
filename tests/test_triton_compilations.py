"""What leads to another compilation of a Triton kernel, on a GPU that is pretended."""

import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from fastrl.triton.registration import INTERPRETED

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

INF = math.inf


@pytest.fixture
def compiled(monkeypatch):
    """The names of the kernels that were compiled; launches do nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    names = []

    def compile_nothing(self, key, signature, device, *_, **__):
        names.append(self.__name__)
        kernel = self.device_caches[device][0][key] = MagicMock()
        return kernel

    gpu = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(jit.JITFunction, "_do_compile", compile_nothing)
    before = driver._active
    driver.set_active(gpu)
    from fastrl.triton import logits_policy_loss, row_sums, token_stats

    kernels = (
        token_stats._token_stats_fwd,
        token_stats._token_stats_bwd,
        logits_policy_loss._logits_policy_loss,
        row_sums._sums_of_blocks,
    )
    for kernel in kernels:
        kernel.device_caches.clear()
    yield names
    for kernel in kernels:
        kernel.device_caches.clear()
    driver._active = before


def coefficients(clip=0.2, kl=0.1, entropy=0.01):
    return [clip, clip, INF, INF, 1.0, 1.05, kl, INF, INF, INF, entropy]


def all_kernels(B=2, T=3, V=64, temperature=1.0, scale=1.0, softcap=0.0, per_row=False, c=None):
    from fastrl.triton.logits_policy_loss import logits_policy_loss_fwd, logits_policy_loss_fwd_
    from fastrl.triton.token_stats import token_stats_bwd, token_stats_bwd_, token_stats_fwd

    logits = torch.zeros(B, T, V, dtype=torch.bfloat16)
    row = torch.ones(B, T)
    heat = row if per_row else None
    options = (row.long(), row.bool(), heat, temperature, scale, softcap)
    token_stats_fwd(logits, *options, True, False)
    for backward in (token_stats_bwd, token_stats_bwd_):
        backward(logits, *options, row, row, row, row, None, None)
    loss = (row, row, None, None, row, row, 0, 2, 0, c or coefficients())
    for one_pass in (logits_policy_loss_fwd, logits_policy_loss_fwd_):
        one_pass(logits, *options, *loss)


def test_lengths_and_numbers_compile_nothing_anew(compiled):
    all_kernels()
    assert sorted(compiled) == ["_logits_policy_loss", "_token_stats_bwd", "_token_stats_fwd"]
    for length in (1, 2, 5, 16, 17, 64, 100, 128, 1000, 1024, 4096):
        all_kernels(T=length)
        all_kernels(B=length, T=1)
    for number in (0.1, 0.5, 1.5, 2.0, 16.0):
        all_kernels(temperature=number, scale=number)
        all_kernels(c=coefficients(clip=number, kl=number, entropy=number))
    all_kernels(c=[0.2, 0.3, 3.0, 2.0, 1.5, 1.5, 0.1, 5.0, 10.0, 10.0, 0.5])
    all_kernels(V=16 * 1000 + 16)  # more lanes, as a constant of the compilation: of V alone
    assert len(compiled) == 6


def test_a_softcap_or_temperatures_per_row_compile_once(compiled):
    for softcap in (20.0, 30.0):
        all_kernels(softcap=softcap)
    assert len(compiled) == 3
    for temperature in (1.0, 2.0):
        all_kernels(temperature=temperature, per_row=True)
    assert len(compiled) == 6


def test_few_rows_compile_nothing_anew_either(compiled, monkeypatch):
    from fastrl.triton import rows

    monkeypatch.setattr(rows, "processors", lambda device: 132)
    for length in (1, 3, 7, 16, 40):
        all_kernels(B=1, T=length, V=160_000)
    once = {"_logits_policy_loss", "_sums_of_blocks", "_token_stats_bwd", "_token_stats_fwd"}
    assert sorted(compiled) == sorted(once)


def test_offsets_of_rows_have_64_bits():
    """Of every target: the pointer of a row is the tensor's plus an i64."""
    import re

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fastrl.triton import token_stats

    target = next(one for one in token_stats.targets() if one.name == "token_stats_bwd")
    names = target.kernel.arg_names
    signature = {name: target.types.get(name, "constexpr") for name in names}
    constants = {
        (place,): target.constants.get(name)
        for place, name in enumerate(names)
        if name not in target.types
    }
    source = ASTSource(target.kernel, signature, constants)
    gpu = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=gpu, options={"num_warps": target.num_warps})
    for name in ("logits", "grad"):
        added = re.findall(
            rf"tt\.addptr %{name}, \S+ : !tt\.ptr<bf16>, (\w+)", compiled.asm["ttir"]
        )
        assert added
        assert set(added) == {"i64"}
