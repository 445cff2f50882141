"""The Triton kernel of the weights per sequence against the reference."""

import itertools

import pytest
import torch

from fastrl import reference
from fastrl.contract import AGGREGATIONS, AggregationArguments
from fastrl.library import operators
from fastrl.reference import sequences_of
from fastrl.triton.runtime.registration import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="runs where TRITON_INTERPRET=1 says so"),
    pytest.mark.interpreted,
]

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
PLAIN = AggregationArguments(
    aggregation=AGGREGATIONS.index("token-mean"),
    normalizer=0.0,
    normalizer_tensor=None,
    length_norm=0.0,
    count_empty=False,
    group_size=0,
    group_ids=None,
)
IGNORED = -100


def of(aggregation, **others):
    size = 2 if aggregation == "prompt-mean" else 0
    number = AGGREGATIONS.index(aggregation)
    return PLAIN._replace(aggregation=number, **{"group_size": size, **others})


@pytest.fixture
def module(monkeypatch):
    """The module of the kernel; sequences take several blocks, and few of them several programs."""
    from fastrl.triton.tokens import sequence_weights

    monkeypatch.setattr(sequence_weights, "BLOCK", 16)
    monkeypatch.setattr(sequence_weights, "COUNTS", 128)
    return sequence_weights


def assert_equals_the_reference(mask, how, cu_seqlens=None, token_ids=None):
    weights, active = operators("triton").sequence_weights(
        mask, token_ids, IGNORED, cu_seqlens, *how
    )
    valid = mask != 0
    if token_ids is not None:
        valid = valid & (token_ids != IGNORED)
    expected = reference.sequence_weights(valid, sequences_of(valid, cu_seqlens), how)
    torch.testing.assert_close(weights, expected, rtol=3e-7, atol=0)
    if token_ids is None and mask.dtype == torch.bool:
        assert active.shape == (0,)
    else:
        assert torch.equal(active, valid)


@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_padded(module, monkeypatch, aggregation, programs):
    monkeypatch.setattr(module, "MOST_PROGRAMS", programs)
    mask = torch.rand(6, 75) > 0.4
    mask[1] = mask[4] = mask[5] = False  # an empty sequence, and an empty group of two
    token_ids = torch.randint(3, mask.shape)
    token_ids[2:4, ::3] = IGNORED
    for ids, count_empty in itertools.product((None, token_ids), (False, True)):
        if count_empty and not aggregation.startswith("seq-mean"):
            continue
        for how in (
            of(aggregation, count_empty=count_empty),
            of(aggregation, count_empty=count_empty, normalizer=7.5),
            of(aggregation, count_empty=count_empty, length_norm=12.0),
        ):
            assert_equals_the_reference(mask, how, token_ids=ids)


@pytest.mark.parametrize("bounds", [(0, 5, 5, 40, 90), (0, 90), (0, 1), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_packed(module, aggregation, bounds):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    mask = torch.rand(1, bounds[-1]) > 0.3
    size = 1 if len(bounds) % 2 == 0 else 2
    how = of(aggregation, length_norm=9.0)
    how = how._replace(group_size=size if how.group_size else 0)
    assert_equals_the_reference(mask, how, cu_seqlens)
    assert_equals_the_reference(mask.long(), how, cu_seqlens)


def test_packed_without_bounds_is_one_sequence(module):
    for aggregation in ("token-mean", "token-sum"):
        assert_equals_the_reference(torch.rand(1, 1000) > 0.5, of(aggregation))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_of_every_dtype(module, dtype):
    mask = (torch.rand(3, 21) > 0.5).to(dtype)
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        assert_equals_the_reference(mask, of(aggregation))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_normalizers_of_every_dtype(module, dtype):
    for mask in (torch.rand(4, 9) > 0.5, torch.zeros(4, 9, dtype=torch.bool)):
        for aggregation in AGGREGATIONS:
            how = of(aggregation, normalizer_tensor=torch.tensor([37]).to(dtype))
            assert_equals_the_reference(mask, how)


@pytest.mark.parametrize("group_size", [1, 3, 24])
def test_groups_of_any_size(module, group_size):
    mask = torch.rand(48, 5) > 0.8
    mask[:24] = False
    assert_equals_the_reference(mask, of("prompt-mean", group_size=group_size))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)], ids=str)
def test_empty_batches(module, shape):
    mask = torch.zeros(shape, dtype=torch.uint8)
    for aggregation in AGGREGATIONS:
        how = of(aggregation)
        assert_equals_the_reference(mask, how._replace(group_size=1 if how.group_size else 0))


def test_two_calls_agree_to_the_bit(module):
    """Each counts its finished programs anew."""
    mask = torch.rand(5, 33) > 0.5
    first, second = (
        operators("triton").sequence_weights(mask, None, 0, None, *of("token-mean"))[0]
        for _ in range(2)
    )
    assert torch.equal(first, second)
