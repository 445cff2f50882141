"""The kernels of the weights per sequence, against the reference in float64."""

from math import inf, nan

import pytest
import torch

from fastrl import reference
from fastrl.contract import AGGREGATIONS, AggregationArguments
from fastrl.library import operators

pytestmark = pytest.mark.kernels_alone  # tests/ops/test_token_weights.py has theirs
IGNORED = 2
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


@pytest.fixture(autouse=True)
def small_blocks(backend, monkeypatch):
    """Let sequences take several blocks."""
    if backend == "triton":
        from fastrl.triton.tokens import sequence_weights

        monkeypatch.setattr(sequence_weights, "BLOCK", 16)
        monkeypatch.setattr(sequence_weights, "COUNTS", 128)


def of(aggregation, **given):
    size = 2 if aggregation == "prompt-mean" else 0
    plain = AggregationArguments(AGGREGATIONS.index(aggregation), 0.0, None, 0.0, False, size, None)
    return plain._replace(**given)


def masks(packed):
    """A mask and `cu_seqlens`: sequences of many chunks, of few tokens, and without any."""
    if not packed:
        mask = torch.rand(8, 173) < 0.6
        mask[2] = False
        mask[4:6] = False  # a whole group
        return mask, None
    lengths = [0, 0, 1, 1, 300, 64, 0, 500, 7, 9, 64, 0]
    mask = torch.rand(1, sum(lengths)) < 0.6
    mask[0, 2:302] = False
    return mask, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def assert_weights(backend, mask, bounds, how, token_ids=None):
    """Hold weights and `active` against the reference; return the weights."""
    given = (mask, token_ids, IGNORED, bounds, *how)
    weights, active = operators(backend).sequence_weights(*given)
    valid = mask != 0
    if token_ids is not None:
        valid = valid & (token_ids != IGNORED)
    if token_ids is not None or mask.dtype != torch.bool:
        assert torch.equal(active, valid)
    else:
        assert active.shape == (0,)
    sequences = reference.sequences_of(mask, bounds)
    expected = reference.sequence_weights(valid, sequences, how, torch.float64)
    torch.testing.assert_close(weights.double(), expected, rtol=3e-7, atol=0)
    assert torch.equal(weights, operators(backend).sequence_weights(*given)[0])
    return weights


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation(backend, aggregation, packed):
    mask, bounds = masks(packed)
    options = {"length_norm": 100.0} if packed else {}
    assert_weights(backend, mask, bounds, of(aggregation, **options))
    assert_weights(backend, mask, bounds, of(aggregation, normalizer=12.0, **options))
    if aggregation.startswith("seq-mean"):
        assert_weights(backend, mask, bounds, of(aggregation, count_empty=True, **options))
    for numbers in (torch.float32, torch.float64, torch.int32, torch.int64):
        how = of(aggregation, normalizer_tensor=torch.tensor([37], dtype=numbers), **options)
        assert_weights(backend, mask, bounds, how)
    none = how._replace(normalizer_tensor=torch.zeros(1))
    assert_weights(backend, torch.zeros_like(mask), bounds, none)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_ids", [False, True])
def test_masks_of_every_dtype(backend, dtype, with_ids):
    mask, bounds = masks(packed=True)
    token_ids = torch.randint(4, mask.shape) if with_ids else None
    given = mask.to(dtype)
    if dtype.is_floating_point:
        given = torch.where(mask, given, -0.0)
    assert_weights(backend, given, bounds, of("seq-mean-token-mean"), token_ids)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0), (1, 1), (2, 64)], ids=str)
def test_shapes_at_the_edge(backend, aggregation, shape):
    size = 1 if aggregation == "prompt-mean" else 0
    assert_weights(backend, torch.ones(shape), None, of(aggregation, group_size=size))


@pytest.mark.parametrize("size", [1, 3, 4, 12])
def test_groups_of_any_size(backend, size):
    mask, bounds = masks(packed=True)
    assert_weights(backend, mask, bounds, of("prompt-mean", group_size=size))


@pytest.mark.not_on("cuda")  # whose blocks each have a chunk of tokens
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_single_program(backend, monkeypatch, aggregation, packed):
    monkeypatch.setattr("fastrl.triton.tokens.sequence_weights.MOST_PROGRAMS", 1)
    mask, bounds = masks(packed)
    assert_weights(backend, mask, bounds, of(aggregation, length_norm=100.0))


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "prompt-mean"])
def test_many_sequences(backend, aggregation):
    lengths = torch.randint(5, (700,))
    mask = torch.rand(1, int(lengths.sum())) < 0.5
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    assert_weights(backend, mask, bounds, of(aggregation))


@pytest.mark.not_on("triton")  # whose language converts
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    ],
    ids=str,
)
def test_numbers_of_every_dtype(backend, dtype):
    values = [0, 1, 3, 100]
    if dtype.is_floating_point:
        values += [0.1, 1 / 3, 2.5, inf, -inf, nan]
    if dtype == torch.float64:  # ties, carries, and numbers that no float32 is near
        values += [1 + 2**-24, 1 + 3 * 2**-24, 2 - 2**-30, 1e300, 1e-300, -7.7, 3.4e38, 3.5e38]
    if dtype in (torch.int64, torch.int32):
        values += [2**24 + 1, 2**31 - 1]
    for value in values:
        number = torch.tensor(value, dtype=dtype)
        how = of("token-mean", normalizer_tensor=number)
        got = operators(backend).sequence_weights(torch.ones(1, 1) > 0, None, IGNORED, None, *how)[
            0
        ]
        expected = 1 / number.to(torch.float32)
        if value > 0:  # else nothing is divided
            assert torch.equal(got.flatten()[0], expected), value
