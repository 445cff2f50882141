"""The weights of sequences on the CUDA kernel in its host build, against the reference."""

import ctypes
from math import inf, nan

import pytest
import torch

from fastrl import reference
from fastrl.contract import AGGREGATIONS, AggregationArguments
from tests.ops.test_term_weights import *  # noqa: F403
from tests.support import cuda_structs as structs
from tests.support.cuda_host import assert_program_passes, library
from tests.support.cuda_on_host import backend, registered, sequence_weights  # noqa: F401

MASKS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
NUMBERS = (torch.float32, torch.float64, torch.int32, torch.int64)


@pytest.mark.parametrize(("sanitizer", "warp"), [("address", 32), ("thread", 8)])
def test_under_sanitizers(sanitizer, warp):
    assert_program_passes("sequence_weights", sanitizer, warp=warp)


def arguments(aggregation, **given):
    grouped = aggregation == "prompt-mean"
    how = AggregationArguments(
        AGGREGATIONS.index(aggregation), 0.0, None, 0.0, False, 2 if grouped else 0, None
    )
    return how._replace(**given)


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


def assert_weights(mask, bounds, how, token_ids=None, ignore_index=-100):
    """Hold weights and `active` against the reference; return the weights."""
    weights, active = sequence_weights(mask, token_ids, ignore_index, bounds, *how)
    valid = mask.bool()
    if token_ids is not None:
        valid = valid & (token_ids != ignore_index)
    if token_ids is not None or mask.dtype != torch.bool:
        assert torch.equal(active, valid)
    else:
        assert active.shape == (0,)
    sequences = reference.sequences_of(mask, bounds)
    expected = reference.sequence_weights(valid, sequences, how, torch.float64)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-7, atol=0)
    return weights


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation(aggregation, packed):
    mask, bounds = masks(packed)
    options = {"length_norm": 100.0} if packed else {}
    assert_weights(mask, bounds, arguments(aggregation, **options))
    assert_weights(mask, bounds, arguments(aggregation, normalizer=12.0, **options))
    if aggregation.startswith("seq-mean"):
        assert_weights(mask, bounds, arguments(aggregation, count_empty=True, **options))


@pytest.mark.parametrize("dtype", MASKS)
@pytest.mark.parametrize("with_ids", [False, True])
def test_masks_of_every_dtype(dtype, with_ids):
    mask, bounds = masks(packed=True)
    token_ids = torch.randint(4, mask.shape) if with_ids else None
    given = mask.to(dtype)
    if dtype.is_floating_point:
        given = torch.where(mask, given, -0.0)
    assert_weights(given, bounds, arguments("seq-mean-token-mean"), token_ids, ignore_index=2)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_normalizers_on_the_device(aggregation, dtype):
    for mask, bounds in (masks(packed=False), masks(packed=True)):
        how = arguments(aggregation, normalizer_tensor=torch.tensor([37], dtype=dtype))
        assert_weights(mask, bounds, how)
        nothing = torch.zeros_like(mask)
        assert_weights(nothing, bounds, how._replace(normalizer_tensor=torch.zeros(1)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (1, 1), (2, 64)])
def test_shapes_at_the_edge(aggregation, shape):
    assert_weights(torch.ones(shape), None, arguments(aggregation, group_size=1))


@pytest.mark.parametrize("size", [1, 3, 4, 12])
def test_groups_of_any_size(size):
    mask, bounds = masks(packed=True)
    how = arguments("prompt-mean", group_size=size)
    weights = assert_weights(mask, bounds, how)
    lengths = reference.sequences_of(mask, bounds).total(mask.to(torch.int64))
    tokens = lengths.view(-1, size).sum(-1)
    groups = (tokens > 0).sum()
    torch.testing.assert_close((weights * lengths).sum() * groups, groups.float())


def test_many_sequences():
    lengths = torch.randint(5, (700,))
    mask = torch.rand(1, int(lengths.sum())) < 0.5
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    for aggregation in ("seq-mean-token-mean", "prompt-mean"):
        assert_weights(mask, bounds, arguments(aggregation))


@pytest.mark.parametrize("dtype", structs.DeviceNumber.DTYPES)
def test_numbers_of_every_dtype(dtype):
    as_float = library("sequence_weights").number_of
    as_float.restype = ctypes.c_float
    values = [0, 1, 3, 100]
    if dtype.is_floating_point:
        values += [0.1, 1 / 3, 2.5, inf, -inf, nan]
    if dtype == torch.float64:  # ties, carries, and numbers that no float32 is near
        values += [1 + 2**-24, 1 + 3 * 2**-24, 2 - 2**-30, 1e300, 1e-300, -7.7, 3.4e38, 3.5e38]
    if dtype in (torch.int64, torch.int32):
        values += [2**24 + 1, 2**31 - 1]
    for value in values:
        number = torch.tensor(value, dtype=dtype)
        struct = structs.DeviceNumber.of(number)
        got = torch.tensor(as_float(ctypes.byref(struct)))
        assert torch.equal(got.nan_to_num(7.0), number.to(torch.float32).nan_to_num(7.0)), value
