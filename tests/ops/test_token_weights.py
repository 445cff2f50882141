"""The weight of every token: each aggregation by its definition, normalizers, groups, packing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastrl
from fastrl.contract import AGGREGATIONS
from tests.fuzz.oracle.bounded import FLOAT32
from tests.fuzz.oracle.tokens import Weighing, token_weights
from tests.ops.closeness import assert_covers, assert_within_budget
from tests.ops.inputs import MASKS, in_layout, layouts, make_mask, mask_kinds, seeds, shapes


def assert_exact(weights, mask, aggregation, normalizer=None, groups=None):
    """Compare with the weights of the oracle."""
    B, T = mask.shape
    sequence = np.repeat(np.arange(B), T)
    groups = np.arange(B) if groups is None else np.array(groups)
    weighing = Weighing(mask.numpy().flatten(), sequence, B, T, groups)
    exact = token_weights(weighing, aggregation, normalizer, FLOAT32)
    assert_covers(exact.reshape(B, T), weights)


def grouping(aggregation, B):
    return {"group_size": 1} if aggregation == "prompt-mean" and B else {}


@pytest.mark.parametrize("normalizer", [None, 5, 0.25, torch.tensor(7), torch.tensor([[2.5]])])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_is_exact(aggregation, mask, normalizer):
    if aggregation == "token-sum" and normalizer is not None:
        pytest.skip("refused: tested with the bad input")
    valid = make_mask(mask, 6, 5)
    weights = fastrl.token_weights(
        valid, aggregation=aggregation, normalizer=normalizer, **grouping(aggregation, 6)
    )
    value = None if normalizer is None else float(normalizer)
    assert_exact(weights, valid, aggregation, value)


@given(shapes, layouts, mask_kinds, seeds, st.sampled_from(AGGREGATIONS))
def test_any_shape_layout_and_mask(shape, layout, mask, seed, aggregation):
    torch.manual_seed(seed)
    B, T = shape
    if (aggregation == "prompt-mean" and not B) or (aggregation.endswith("norm") and not T):
        return
    valid = in_layout(make_mask(mask, B, T), layout)
    weights = fastrl.token_weights(valid, aggregation=aggregation, **grouping(aggregation, B))
    assert_exact(weights, valid, aggregation)


# the mask [1 1 1 1] [1 1 0 0] [0 0 0 0]: 6 tokens, 2 sequences that count
BY_HAND = [
    ("token-mean", {}, [1 / 6, 1 / 6]),
    ("seq-mean-token-mean", {}, [1 / 8, 1 / 4]),
    ("seq-mean-token-sum", {}, [1 / 2, 1 / 2]),
    ("seq-mean-token-sum-norm", {}, [1 / 8, 1 / 8]),
    ("seq-mean-token-sum-norm", {"length_norm": 10}, [1 / 20, 1 / 20]),
    ("seq-mean-token-mean", {"count_empty": True}, [1 / 12, 1 / 6]),
    ("seq-mean-token-sum", {"count_empty": True}, [1 / 3, 1 / 3]),
    ("seq-mean-token-sum-norm", {"count_empty": True}, [1 / 12, 1 / 12]),
    ("token-sum", {}, [1, 1]),
    ("prompt-mean", {"group_ids": [5, 5, 5]}, [1 / 6, 1 / 6]),
    ("prompt-mean", {"group_ids": [1, 0, 1]}, [1 / 8, 1 / 4]),
    ("prompt-mean", {"group_ids": [3, 2, 1]}, [1 / 8, 1 / 4]),
    ("prompt-mean", {"group_size": 3}, [1 / 6, 1 / 6]),
    ("prompt-mean", {"group_size": 3, "normalizer": 2}, [1 / 12, 1 / 12]),
]


@pytest.mark.parametrize(("aggregation", "options", "expected"), BY_HAND)
def test_weights_by_hand(aggregation, options, expected):
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    if "group_ids" in options:
        options = {**options, "group_ids": torch.tensor(options["group_ids"])}
    weights = fastrl.token_weights(mask, aggregation=aggregation, **options)
    assert [weights[0, 0].item(), weights[1, 0].item()] == pytest.approx(expected)
    assert torch.equal(weights != 0, mask.bool())


@pytest.mark.parametrize("ids", [[0, 1, 0, 2, 1, 0], [-(2**62), 2**62, -1, 7, 7, 2**62]])
@pytest.mark.parametrize("mask", MASKS)
def test_prompt_groups_in_any_order(ids, mask):
    valid = make_mask(mask, 6, 4)
    weights = fastrl.token_weights(valid, aggregation="prompt-mean", group_ids=torch.tensor(ids))
    assert_exact(weights, valid, "prompt-mean", groups=ids)


@pytest.mark.parametrize("count", [7, 12, 1000])
def test_the_number_of_groups_is_counted_without_rounding(count):
    # groups of three members: thirds must add up to whole groups
    mask = torch.ones(3 * count, 1)
    weights = fastrl.token_weights(mask, aggregation="prompt-mean", group_size=3)
    assert_within_budget(weights, torch.full((3 * count, 1), 1 / 3 / count, dtype=torch.float64))


@pytest.mark.parametrize("aggregation", ["token-mean", "token-sum"])
def test_packed_tokens_need_bounds_only_for_sequences(aggregation):
    weights = fastrl.token_weights(torch.tensor([1, 0, 1, 1]), aggregation=aggregation)
    value = 1 / 3 if aggregation == "token-mean" else 1.0
    assert weights.tolist() == pytest.approx([value, 0, value, value])


def test_a_sum_of_weighted_losses_is_the_loss():
    losses, mask = torch.randn(4, 6), make_mask("ragged", 4, 6)
    weights = fastrl.token_weights(mask, aggregation="seq-mean-token-mean")
    rows = [row[valid].mean() for row, valid in zip(losses, mask, strict=True) if valid.any()]
    torch.testing.assert_close((weights * losses).sum(), torch.stack(rows).mean())


def test_many_tokens_are_counted_exactly():
    # 2^24 + 1 tokens are no float32
    mask = torch.ones(1, 2**24 + 2, dtype=torch.bool)
    mask[0, -1] = False
    weights = fastrl.token_weights(mask, aggregation="token-mean")
    assert weights[0, 0].item() == pytest.approx(1 / (2**24 + 1), rel=1.2e-7)
