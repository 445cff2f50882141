"""Every kernel on eight seeds: other schedules, other approximations, other devices."""

import itertools

import pytest
import torch

import fastrl
from fastrl.library import operators
from tests.calls.case import Case
from tests.calls.combined import assert_value
from tests.gpu.rows import (
    DTYPES,
    loss_of,
    make_rows,
    one_pass,
    rows_of,
    saved,
    shared_out,
    token_stats,
)
from tests.gpu.test_narrow_gradient import Workspace
from tests.ptx import cuda_operators
from tests.ptx.machine import machine

pytestmark = [pytest.mark.kernels_alone, pytest.mark.slow]  # a CPU has no schedule
TOKENS = {"tokens": 5, "sequences": 3, "mask": "holes", "masked_values": "nan"}
LOSS = {"old": "near", "ref": "near", "fields": {"kl_coef": 0.1, "entropy_coef": 0.02}}
CASES = [
    *(
        Case("gae", **TOKENS, parameters={"bootstrap": how})
        for how in ("none", "sequence", "token")
    ),
    Case("gae", sequences=1, tokens=9000, parameters={"bootstrap": "token"}),
    Case("gae", sequences=2, tokens=5000, layout="cut", mask="holes"),
    *(
        Case("policy_loss", **TOKENS, **LOSS, objective=objective, layout=layout, entropy=True)
        for objective in ("dapo", "gspo", "gmpo")
        for layout in ("padded", "cut")
    ),
    Case("policy_loss", sequences=1, tokens=9000, objective="gspo", old="near"),
]
OPTIONS = ({}, {"logit_softcap": 8.0})


@pytest.mark.parametrize("seed", range(8))
def test_every_kernel(backend, monkeypatch, seed):
    monkeypatch.setattr(machine(), "seed", seed)
    monkeypatch.setattr(machine(), "launched", set())
    for case in CASES:
        assert_value(backend, case)
    for shared in (False, True):
        with shared_out(backend, monkeypatch, shared):
            for n, dtype in enumerate(DTYPES):
                for V, options in itertools.product((1024, 1003), of_kernels(backend, n)):
                    one_row_kernels(backend, dtype, V, options)
            for n, V in enumerate((1000, 1003)):
                for options in of_kernels(backend, n):
                    narrow(backend, V, options)
    scales(backend)
    groups(backend)
    if backend == "cuda":
        assert not {*cuda_operators.load().ptx} - machine().launched


def of_kernels(backend, n):
    """All options, or by turns for Triton, which takes seconds to compile a kernel."""
    return OPTIONS if backend == "cuda" else OPTIONS[n % 2 :][:1]


def one_row_kernels(backend, dtype, V, options):
    """As the CPU's, in each dtype; the gradient may be rounded otherwise."""
    _, logits, token_ids, mask = make_rows(V, dtype)
    rows = rows_of(token_ids, mask, **options)
    loss = loss_of(logits, token_ids, mask, **options)
    slopes = [torch.randn(1, 4) for _ in range(3)]
    stats = saved(token_stats("cpu", logits, rows))

    def results(name):
        space = operators(name)
        for wanted in ((False, False), (True, False), (True, True)):
            found = space.token_stats_fwd(logits, *rows, *wanted)
            yield from found[: 3 + wanted[1]] if wanted[0] else (found[0], found[2])
        yield space.token_stats_bwd(logits, *rows, *stats, *slopes)
        if dtype != torch.float16 or name != "cpu":
            yield from one_pass(name, logits, rows, *loss)

    for got, want in zip(results(backend), results("cpu"), strict=dtype != torch.float16):
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, want, rtol=2 * eps, atol=2e-6, equal_nan=True)


def narrow(backend, vocabulary, options):
    """A gradient of 16 bits over float32 logits is the one of 32 bits, rounded."""
    work = Workspace(vocabulary, 1008)
    rows = rows_of(work.token_ids, work.mask, **options)
    loss = loss_of(work.logits, work.token_ids, work.mask, **options)
    work.gradients(operators(backend).logits_policy_loss_fwd_, *rows, *loss[0], *loss[1])
    grads = [torch.randn(1, 4) for _ in range(6)]
    work.gradients(operators(backend).token_stats_bwd_, *rows, *grads)


def scales(backend):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(3000).to(dtype)
        expected = (x.float() * 0.7).to(dtype)
        operators(backend).scale_(x, torch.tensor(0.7))
        assert torch.equal(x, expected)


def groups(backend):
    """Of a part of a block, of a block each, and of several; consecutive or not."""
    for (count, size), scale in itertools.product(
        ((9, 4), (2, 1400), (3000, 2)), ("group", "batch")
    ):
        rewards, place = torch.randn(count * size), torch.randperm(count * size)
        ids = torch.arange(count).repeat_interleave(size)[place]
        for given in ({"group_size": size}, {"group_ids": ids}):
            found, exact = (
                fastrl.group_advantages(rewards, **given, scale=scale, backend=name).advantages
                for name in (backend, "cpu")
            )
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
