"""The weight of every token by hand: aggregations, normalizers, groups, packing."""

import pytest
import torch

import fastrl
from tests.ops.closeness import assert_within_budget
from tests.ops.inputs import make_mask

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
