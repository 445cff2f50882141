"""The global denominator in one process; over ranks, see ranks/test_process_groups.py."""

import pytest
import torch

import fastrl
from fastrl import Objective
from fastrl.contract import AGGREGATIONS
from tests.ops.inputs import MASKS, cu_seqlens, make_mask, packed

COUNTED = [name for name in AGGREGATIONS if name != "token-sum"]


def groups(aggregation):
    return {"group_size": 2} if aggregation == "prompt-mean" else {}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("aggregation", COUNTED)
def test_it_is_the_denominator_of_a_single_batch(aggregation, kind):
    mask = make_mask(kind, 6, 5)
    options = {"aggregation": aggregation, **groups(aggregation)}
    count = fastrl.global_normalizer(mask, **options)
    assert count.dtype == torch.float64
    assert count.shape == ()
    found = fastrl.token_weights(mask, normalizer=count, **options)
    assert torch.equal(found, fastrl.token_weights(mask, **options))
    assert fastrl.global_normalizer(list(mask.split([2, 4])), **options) == count


def test_counts_by_hand():
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    ids = torch.tensor([7, 7, 7, -2, -2, 3])
    for expected, options in (
        (4, {"aggregation": "token-mean"}),
        (2, {"aggregation": "seq-mean-token-mean"}),
        (6, {"aggregation": "seq-mean-token-sum", "count_empty": True}),
        (2, {"aggregation": "prompt-mean", "group_size": 2}),
        (1, {"aggregation": "prompt-mean", "group_ids": ids}),
        (4, {"objective": "dapo"}),
        (2, {"objective": "gspo"}),
        (6, {"objective": Objective.preset("grpo", convention="trl")}),
        (4, {"objective": lambda logprobs, old, ref, advantages: -logprobs * advantages}),
    ):
        assert fastrl.global_normalizer(mask, **options) == expected, options
    assert fastrl.global_normalizer(torch.zeros(2, 3), objective="dapo") == 0


@pytest.mark.parametrize("aggregation", COUNTED)
def test_packed_sequences(aggregation):
    lengths = (3, 1, 4, 2)
    padded = make_mask("random", 4, 4) & (torch.arange(4) < torch.tensor(lengths)[:, None])
    flat, bounds = packed(padded, lengths), cu_seqlens(lengths)
    options = {"aggregation": aggregation, **groups(aggregation)}
    count = fastrl.global_normalizer(padded, **options)
    assert fastrl.global_normalizer(flat, cu_seqlens=bounds, **options) == count
    twice = fastrl.global_normalizer([flat, flat], cu_seqlens=[bounds, bounds], **options)
    assert twice == 2 * count


def test_terms_with_separate_aggregations_have_their_own_counts():
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 0]])
    kl = {"kl_coef": 0.1, "kl_aggregation": "token-mean"}
    entropy = {"entropy_coef": 0.1, "entropy_aggregation": "prompt-mean"}
    both, off = (
        Objective.preset("grpo", **kl, **entropy),
        Objective.preset("gspo", convention="verl"),
    )
    assert off.kl_aggregation == "token-mean"  # of a term that is off
    zeros = torch.zeros(4, 3)
    for objective, grouped, expected in (
        (both, {"group_size": 2}, {"policy": 3, "kl": 6, "entropy": 2}),
        (Objective.preset("grpo", **kl), {}, {"policy": 3, "kl": 6}),
        (Objective(aggregation="token-sum", **kl), {}, {"kl": 6}),  # a sum has no count
        (off, {}, 3),
    ):
        count = fastrl.global_normalizer(mask, objective=objective, **grouped)
        assert count == expected
        given = {"ref_logprobs": zeros} if objective.kl_coef else {}
        given |= {"entropy": zeros} if objective.entropy_coef else {}
        given |= {"objective": objective, "normalizer": count, **grouped}
        fastrl.policy_loss(zeros, torch.ones(4), mask, **given)
    twice = fastrl.global_normalizer([mask, mask], objective=both, group_size=2)
    assert twice == {"policy": 6, "kl": 12, "entropy": 4}


def test_it_is_traced():
    compiled = torch.compile(fastrl.global_normalizer, fullgraph=True, backend="eager")
    masks = [make_mask("ragged", 4, 5), make_mask("ragged", 2, 5)]
    count = fastrl.global_normalizer(masks, objective="grpo")
    assert compiled(masks, objective="grpo") == count
