"""Calls on a GPU: large ones exact, all repeatable, without a sync, captured, on streams."""

from pathlib import Path

import pytest
import torch

import fastrl
from fastrl.backend import unavailable
from tests.calls.case import Case
from tests.gpu.device.conftest import GPU_BACKENDS
from tests.gpu.device.limit import ROOT
from tests.gpu.device.workloads import (
    LOSS,
    PRECISIONS,
    TOKENS,
    assert_right,
    of_case,
    of_hidden,
    of_logits,
    of_tokens,
    small,
)

CUDA = "cuda"
OUTPUTS = {"outputs": ("logprobs", "entropy", "logsumexp"), "upstream": "random"}
#: Larger than a row of the table, which every CPU examines.
LARGE = [
    *(
        case.changed(dtype=dtype)
        for vocabulary in (32_000, 151_936, 262_208)
        for dtype in ("float32", "bfloat16", "float16")
        for case in (*of_logits(2, 5, vocabulary),)[::4]
    ),
    *of_tokens(2, 32_768),
    *of_tokens(16, 20_000),
    *(
        case
        for precision in PRECISIONS
        for shape in (
            {"vocabulary": 50_257, "hidden": 64, "tokens": 33, "bias": True},
            {"vocabulary": 129, "hidden": 1000, "tokens": 150, "lora": 3},
        )
        for case in of_hidden(precision, sequences=2, **shape)
    ),
    *(
        Case("group_advantages", **size, groups=groups, parameters={"scale": scale})
        for size in ({"sequences": 2500, "tokens": 8}, {"sequences": 2, "tokens": 3000})
        for groups in (None, "ids")
        for scale in ("group", "batch")
    ),
    # more sequences or rows than a limited axis of a grid has blocks
    Case("policy_loss", **LOSS, sequences=70_000, tokens=2, objective="gspo", entropy=True),
    Case("token_logprobs", sequences=1, tokens=131_072, vocabulary=64, **TOKENS),
    Case("token_logprobs", sequences=70_000, tokens=2, vocabulary=64, **TOKENS),
]


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_the_backend_can_be_used(name):
    """One that cannot skips its tests."""
    assert unavailable(name) is None


def test_there_are_kernels_to_test():
    assert fastrl.backend.resolve("auto", torch.device(CUDA), torch.float32) != "reference"
    assert Path(fastrl.__file__).parents[1] == ROOT, "another installation is tested"


@pytest.mark.parametrize("case", LARGE, ids=repr)
def test_large_calls_are_right(kernels, case):
    assert_right(case, kernels, CUDA)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_waits_for_the_gpu(kernels, no_sync, precision):
    cases = of_hidden(precision, compact=False, bias=True)
    works = [of_case(case, CUDA) for case in (*cases, *(small() if precision == "fp32" else ()))]
    for work in works:
        work.run(kernels)  # compilation may synchronize
    no_sync()
    for work in works:
        work.run(kernels)


def test_runs_are_bit_equal(kernels):
    linear = [case for name in PRECISIONS for case in of_hidden(name, lora=3, bias=True)]
    # few rows are split over programs, many are not
    logits = [
        case
        for size in ((2, 8, 128256), (4, 100, 4097))
        for case in of_logits(*size, dtype="bfloat16")
    ]
    for case in [*of_tokens(16, 5000), *logits, *linear]:
        work = of_case(case, CUDA)
        first = work.run(kernels)
        for _ in range(5):
            assert all(map(torch.equal, work.run(kernels), first)), case


def test_a_captured_graph(kernels, captured):
    """Replayed on other inputs; eager calls between replays do not interfere."""
    linear = [case for name in PRECISIONS for case in of_hidden(name, compact=False)]
    for case in [*small(), *of_tokens(33, 3000), *linear]:
        work = of_case(case, CUDA)
        answer, replay = captured(lambda work=work: work.run(kernels))
        for step in range(3):
            for x in work.tensors():
                if x.is_floating_point():
                    x.detach().mul_(1 - 0.01 * step)
            eager = work.run(kernels)
            replay()
            assert all(map(torch.equal, answer, eager)), case


def test_graphs_side_by_side_do_not_disturb_each_other(kernels, captured):
    """Kernels that count their blocks overlap, on other inputs: neither graph changes a bit."""
    for case in of_tokens(65, 4000):
        works = [of_case(case.changed(seed=seed), CUDA) for seed in (0, 1, 0, 1)]
        wanted = [work.run(kernels) for work in works]
        graphs = [captured(lambda work=work: work.run(kernels)) for work in works]
        streams = [torch.cuda.Stream() for _ in graphs]
        for answer, _ in graphs:
            for x in answer:
                x.zero_()
        torch.cuda.synchronize()
        for _ in range(20):
            for stream, (_, replay) in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    replay()
        torch.cuda.synchronize()
        for (answer, _), exact in zip(graphs, wanted, strict=True):
            assert all(map(torch.equal, answer, exact)), case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_does_not_depend_on_other_rows(kernels, dtype):
    """With many rows each gets a program, few rows are split over programs; the bits agree."""
    case = Case("token_stats", tokens=700, vocabulary=151_936, spread=3.0, **OUTPUTS)
    work = of_case(case.changed(dtype=str(dtype).removeprefix("torch.")), CUDA)
    together, logits, ids = work.run(kernels), work.given["logits"], work.given["token_ids"]

    def of(rows, ids):
        mask = torch.ones_like(ids, dtype=torch.bool)
        work.given |= {"logits": rows, "token_ids": ids, "mask": mask}
        return work.run(kernels)

    for size in (1, 5, 60):
        alone = of(logits[:, :size].detach(), ids[:, :size])
        assert all(
            torch.equal(many[:, :size], few) for many, few in zip(together, alone, strict=True)
        )
    shifted = torch.empty(logits.numel() + 1, dtype=dtype, device=CUDA)[1:].view_as(logits)
    assert all(map(torch.equal, together, of(shifted.copy_(logits.detach()), ids)))
