"""What leads to another compilation of a Triton kernel, on a GPU that is pretended."""

import importlib
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import fastrl
from fastrl.contract import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    KL_GRADIENTS,
    KL_LEVELS,
    LEVELS,
    SURROGATES,
    AggregationArguments,
    Coefficients,
    LossArguments,
    ObjectiveArguments,
    RowArguments,
)

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.slow

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
    from fastrl.triton import scale
    from fastrl.triton.gae import gae
    from fastrl.triton.tokens import policy_loss, sequence_weights
    from fastrl.triton.vocabulary import logits_policy_loss, row_sums, token_stats

    kernels = (
        scale.scale_kernel,
        gae.gae_kernel,
        policy_loss.policy_loss_kernel,
        sequence_weights.sequence_weights_kernel,
        token_stats.token_stats_fwd_kernel,
        token_stats.token_stats_bwd_kernel,
        logits_policy_loss.logits_policy_loss_kernel,
        row_sums.sums_of_blocks_kernel,
    )
    for kernel in kernels:
        kernel.device_caches.clear()
    yield names
    for kernel in kernels:
        kernel.device_caches.clear()
    driver._active = before


COEFFICIENTS = fastrl.Objective(kl_coef=0.1, entropy_coef=0.01).arguments.coefficients
OF_ROWS = ["logits_policy_loss_kernel", "token_stats_bwd_kernel", "token_stats_fwd_kernel"]


def coefficients(clip=0.2, kl=0.1, entropy=0.01):
    return COEFFICIENTS._replace(clip_low=clip, clip_high=clip, kl_coef=kl, entropy_coef=entropy)


def objective(c=COEFFICIENTS, level="token"):
    return ObjectiveArguments(
        surrogate=SURROGATES.index("ppo_clip"),
        level=LEVELS.index(level),
        kl_estimator=KL_ESTIMATORS.index("k3"),
        kl_gradient=KL_GRADIENTS.index("exact"),
        kl_level=KL_LEVELS.index("token"),
        coefficients=c,
    )


def loss_arguments(constants, row, cu_seqlens=None):
    return LossArguments(constants, constants, None, None, None, row, row, cu_seqlens)


def all_kernels(
    B=2, T=3, V=64, temperature=1.0, scale=1.0, softcap=0.0, per_row=False, c=COEFFICIENTS,
    ignore_index=-100, constants=None, sequences=None,
):  # fmt: skip
    from fastrl.triton.vocabulary.logits_policy_loss import (
        logits_policy_loss_fwd,
        logits_policy_loss_fwd_,
    )
    from fastrl.triton.vocabulary.token_stats import (
        token_stats_bwd,
        token_stats_bwd_,
        token_stats_fwd,
    )

    logits = torch.zeros(B, T, V, dtype=torch.bfloat16)
    row = torch.ones(B, T)
    heat = row if per_row else None
    rows = RowArguments(row.long(), row.bool(), ignore_index, heat, temperature, scale, softcap)
    token_stats_fwd(logits, *rows, True, False)
    backward = (logits, *rows, row, row, row, row, None, None)
    token_stats_bwd(*backward)
    token_stats_bwd_(*backward, False)
    bounds = None if sequences is None else torch.zeros(sequences + 1, dtype=torch.int32)
    loss = loss_arguments(row if constants is None else constants, row, bounds)
    one_pass = (logits, *rows, *loss, *objective(c))
    logits_policy_loss_fwd(*one_pass)
    logits_policy_loss_fwd_(*one_pass, False)


def test_lengths_and_numbers_compile_nothing_anew(compiled):
    all_kernels()
    assert sorted(compiled) == OF_ROWS
    for length in (1, 2, 5, 16, 17, 64, 100, 128, 1000, 1024, 4096):
        all_kernels(T=length)
        all_kernels(B=length, T=1)
    for number in (0.1, 0.5, 1.5, 2.0, 16.0):
        all_kernels(temperature=number, scale=number)
        all_kernels(c=coefficients(clip=number, kl=number, entropy=number))
    for ignore_index in (0, 1, 16, -1, 2**40):
        all_kernels(ignore_index=ignore_index)
    all_kernels(c=Coefficients(0.2, 0.3, 3.0, 2.0, 1.5, 1.5, 0.1, 5.0, 10.0, 10.0, 0.5))
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
    from fastrl.triton.vocabulary import rows

    monkeypatch.setattr(rows, "processors", lambda device: 132)
    for length in (1, 3, 7, 16, 40):
        all_kernels(B=1, T=length, V=160_000)
    assert sorted(compiled) == sorted([*OF_ROWS, "sums_of_blocks_kernel"])


def test_few_rows_fill_the_device(monkeypatch):
    from fastrl.triton.vocabulary import rows

    monkeypatch.setattr(rows, "processors", lambda device: 132)

    def programs(count, *places):
        logits = torch.zeros(1, 1, 1).expand(1, count, 151_936)
        return count * rows.splits_of(logits, *places)

    for count in (26, 67, 100, 131, 132, 133, 200, 264):
        assert 264 - count < programs(count) <= 264  # no other program for each would fit
    for count in (265, 400, 4096):
        assert programs(count) == count
    for count in (67, 133, 265, 400, 1056):
        assert 528 < programs(count, rows.EVEN) <= max(1056, count)


def test_numbers_of_sequences_compile_nothing_anew(compiled):
    for sequences in (1, 2, 3, 16, 17, 100):
        all_kernels(B=sequences, T=2, constants=torch.ones(sequences))
    assert len(compiled) == len(OF_ROWS)
    for sequences in (1, 2, 3, 16, 17, 100):
        all_kernels(B=1, T=5, constants=torch.ones(sequences), sequences=sequences)
    assert sorted(compiled) == sorted([*OF_ROWS, "logits_policy_loss_kernel"])


def test_logits_that_begin_anywhere_are_not_read_in_words():
    """Strides alone do not tell: a slice of a buffer may begin at an odd logit."""
    from fastrl.triton.vocabulary.rows import launch_options

    buffer = torch.zeros(4 * 64 + 8, dtype=torch.bfloat16)
    assert buffer.data_ptr() % 16 == 0
    for start, aligned in ((0, True), (1, False), (2, False), (4, False), (8, True)):
        logits = buffer[start : start + 4 * 64].view(2, 2, 64)
        assert launch_options(logits, softcap=0.0)["SPEC"].aligned is aligned
        fresh = torch.zeros(2, 2, 64, dtype=torch.bfloat16)
        assert launch_options(logits, fresh, softcap=0.0)["SPEC"].aligned is aligned


def test_lengths_of_gae_compile_nothing_anew(compiled):
    from fastrl.triton.gae.gae import gae_fwd

    def run(B, T, sequences):
        x = torch.zeros(B, T)
        bounds = None
        if sequences is not None:
            bounds = torch.linspace(0, T, sequences + 1).to(torch.int32)
        gae_fwd(x, x, x.bool(), None, None, None, bounds, 0.9, 0.95)

    for B, T, sequences in ((4, 4000, None), (1, 4000, 7), (1, 800, 7), (4, 48, None)):
        run(B, T, sequences)  # two launches, or one where sequences end inside their chunk
    assert len(compiled) == 6
    for T in (1, 2, 8, 24, 40, 117 * 4, 100, 1000, 2000, 2052, 4136):
        for B, sequences in ((4, None), (8, None), (1, 1), (1, 2), (1, 16)):
            run(*((B, T) if sequences is None else (1, 4 * T)), sequences)
    assert len(compiled) == 6


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_lengths_of_the_policy_loss_compile_two_kernels(compiled, per_sequence, level):
    """One for token counts that are multiples of 4, at sequence level lengths; one for others."""
    from fastrl.triton.tokens.policy_loss import policy_loss_fwd

    def run(T, start=0):
        def view(rows, columns, dtype=torch.float32):
            buffer = torch.zeros(start + rows * columns, dtype=dtype)
            return buffer[start:].view(rows, columns)

        x = view(3, T)
        loss = loss_arguments(view(1, 3)[0] if per_sequence else x, x)
        policy_loss_fwd(x, None, view(3, T, torch.bool), *loss, *objective(level=level))

    for T in (16, 4, 8, 100, 48, 1500, 2048, 600_000):
        run(T)
    assert compiled == ["policy_loss_kernel"]
    for T in (1, 2, 3, 5, 117, 4001, 70_001):
        run(T)
    assert len(compiled) == 2
    for start in range(1, 8):  # tensors that begin anywhere
        for T in (16, 3, 117, 2000):
            run(T, start)
    assert len(compiled) == 2


def test_batches_of_the_weights_compile_two_kernels(compiled):
    """One for few counts of a sequence or group, one for many."""
    from fastrl.triton.tokens.sequence_weights import sequence_weights

    how = AggregationArguments(
        AGGREGATIONS.index("prompt-mean"), 0.0, None, 0.0, False, group_size=1, group_ids=None
    )
    for group_size in (1, 2, 4, 16, 64):
        for T in (1, 2, 16, 100, 4096, 100_000):
            mask = torch.ones(64, T, dtype=torch.bool)
            sequence_weights(mask, None, -100, None, *how._replace(group_size=group_size))
    assert len(compiled) == 2


def test_lengths_and_places_of_a_scaled_gradient_compile_one_kernel(compiled, monkeypatch):
    from fastrl.triton.scale import scale_

    factor = torch.tensor([1.0, 2.0])
    for length in (1, 2, 15, 16, 17, 4096, 40_000, 400_000):
        buffer = torch.zeros(3, length + 8, dtype=torch.bfloat16)
        for start in range(8):
            scale_(buffer[0, start : start + length], factor[0])
            scale_(buffer[:, start : start + length], factor[1])
    monkeypatch.setattr("fastrl.triton.scale.segments_of", lambda _: (3, 2**32, 2**33))
    scale_(buffer, factor[0])
    assert compiled == ["scale_kernel"]


def code_of(name, monkeypatch):
    """The code of a target at every stage of the compilation."""
    from triton.backends.compiler import GPUTarget

    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench" / "gpu_cost")
    targets = importlib.import_module("targets")
    target = next(one for one in targets.triton_targets() if one.name == name)
    options = {"num_warps": target.num_warps, "enable_fp_fusion": target.enable_fp_fusion}
    source = targets.triton_source(target)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


@pytest.mark.parametrize("name", ["token_stats_fwd", "logits_policy_loss"])
def test_sums_are_laid_out_alike_wherever_rows_begin(name, monkeypatch):
    """So that they are added in the same order: a row's bits do not depend on its alignment."""

    def layouts(suffix):
        code = code_of(f"{name}{suffix}", monkeypatch)["ttgir"]
        named = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", code, flags=re.MULTILINE))
        summed = re.findall(r"\}\) : \((tensor<[^()]*f32, [^()]*>)\) -> ", code)
        return {re.sub(r"#blocked\d*", lambda m: named[m[0]], one) for one in summed}

    assert len(layouts("")) >= 2
    assert layouts("") == layouts("_unaligned") == layouts("_padded")


@pytest.mark.parametrize("name", ["token_stats_bwd_narrow", "logits_policy_loss_narrow"])
def test_a_narrow_gradient_is_stored_after_all_loads_of_its_block(name, monkeypatch):
    """Threads would overwrite what others have not read; the interpreter knows no threads."""
    steps = re.findall(r"(ld|st)\.global[.\w]*v4|(bar)\.sync", code_of(name, monkeypatch)["ptx"])
    order = ["".join(step) for step in steps]
    assert {"ld", "st", "bar"} == set(order)
    assert ("ld", "st") not in set(itertools.pairwise(order))


def test_offsets_of_rows_have_64_bits(monkeypatch):
    """Of every target: the pointer of a row is the tensor's plus an i64."""
    ttir = code_of("token_stats_bwd", monkeypatch)["ttir"]
    for name in ("logits", "grad"):
        added = re.findall(rf"tt\.addptr %{name}, \S+ : !tt\.ptr<bf16>, (\w+)", ttir)
        assert added
        assert set(added) == {"i64"}
    ttir = code_of("scale_bf16", monkeypatch)["ttir"]
    assert set(re.findall(r"tt\.addptr \S+ \S+ : !tt\.ptr<bf16>, (\w+)", ttir)) == {"i64"}
