"""A vocabulary that is split over gloo ranks gives what one process gives."""

import functools

import pytest
import torch

import fastrl
from fastrl.ops import _row_stats
from fastrl.ops._vocabulary_parts.described import described
from tests.ops.gloo_ranks import on_ranks
from tests.ops.vocabulary_ranks import linear_on_ranks, logits_on_ranks
from tests.support.vocabulary_rank_agreement import (
    SAME,
    disagreements_on_ranks,
    gradients_on_ranks,
    other_settings_on_ranks,
)
from tests.support.vocabulary_rank_behavior import (
    collectives_on_ranks,
    compiled_on_ranks,
    dying_on_ranks,
    likely_on_ranks,
    other_rows_on_ranks,
    refusals_on_ranks,
    tensor_parallel_on_ranks,
    twice_on_ranks,
)

#: sizes of the parts -> banned columns: none, all of a part, parts of two
SPLITS = {
    (32, 32): (0, 0),
    (1, 310): (0, 1),
    (104, 104, 103): (50, 150),
    (80, 1, 150, 80): (81, 231),
}
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("form", [logits_on_ranks, linear_on_ranks])
def test_equal_to_the_whole_vocabulary_and_on_all_ranks(backend, form, sizes, dtype):
    first, *others = on_ranks(len(sizes), form, sizes, backend, dtype, SPLITS[sizes])
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert all(map(torch.equal, one, two))


def test_one_collective_per_chunk(backend):
    for rank, order in on_ranks(2, collectives_on_ranks, (20, 17), backend):
        chunks = 9  # two of them exist at once, of 5 rows each
        in_backward = 5  # which needs no statistics, so the chunks have 10
        sizes = 1  # of the parts, once per call
        forward = {"all_gather": sizes + chunks}
        assert rank["loss, partial"] == (forward, forward)
        assert rank["loss"] == ({**forward, "all_reduce": chunks},) * 2
        assert rank["logprobs, partial"] == (forward, forward)
        rows = 1  # which ones have a gradient on any rank, once per backward
        backward = {"all_gather": forward["all_gather"] + rows, "all_reduce": in_backward}
        assert rank["logprobs"] == (forward, backward)
        assert rank["logits"] == ({"all_gather": sizes + 1},) * 2
        # the next chunk is projected before the ranks wait for each other
        assert order == "PS" + "PSW" * (chunks - 1) + "W"


def test_a_head_that_is_tensor_parallel_beside_data_parallelism(backend):
    for inplace, unnamed, other in on_ranks(4, tensor_parallel_on_ranks, backend):
        assert inplace.startswith(
            "ValueError: inplace_backward=True needs a plain tensor, got a DT"
        )
        assert unnamed.startswith("TypeError: logits must be a plain tensor, got a DTensor: pass")
        assert "weight must be a plain tensor or a DTensor with Shard(0) over the ranks" in other


def test_two_runs_are_bit_equal_in_any_dtype(backend):
    on_ranks(2, twice_on_ranks, backend)


def test_a_compiled_graph_breaks_where_sizes_are_exchanged():
    on_ranks(2, compiled_on_ranks)


def test_a_group_of_one_has_the_whole_vocabulary(backend):
    for form in (logits_on_ranks, linear_on_ranks):
        on_ranks(1, form, (37,), backend, torch.float32, (0, 0))


def test_what_is_refused_is_refused_on_every_rank():
    first, second = on_ranks(2, refusals_on_ranks)
    assert first.keys() == second.keys()
    differ = "must be the same on every rank of vocab_group, which splits the vocabulary and not"
    for name in ("ids", "masks", "temperatures", "advantages"):
        assert differ in first[f"other {name}"], name
    assert first["other advantages"].startswith("ValueError: advantages must be the same on ever")
    empty = "ValueError: vocab_group: every rank needs at least one column of the vocabulary"
    assert first["an empty part"] == first["an empty part of logits"] == f"{empty}, got [0, 5]"
    outside = "ValueError: token_ids must lie in [0, 10) or be ignore_index, got 10 at (0, 3)"
    assert first["an id outside"] == first["an id outside, logits"] == outside
    assert first["no group"].startswith("TypeError: vocab_group must be a ProcessGroup or None, ")
    assert first["a bias of another part"].startswith("ValueError: bias must have shape (5,)")


def test_ranks_that_disagree_about_an_argument_all_raise():
    changed, refused, results = zip(*on_ranks(2, disagreements_on_ranks), strict=True)
    for ranks in changed:
        for place, ending in ranks.items():
            assert isinstance(ending, str), place
            names, same, _ = ending.partition(" must be the same on every rank of vocab_group")
            assert same, place
            assert place.split(", ")[1] in names, (place, ending)
    for place, ending in refused[0].items():
        assert ending == "ValueError: vocab_group: this call raised on its ranks [1]; see there"
        assert refused[1][place].startswith(("TypeError", "ValueError")), place
        assert "its ranks [1]" not in refused[1][place]
    assert len(results[0]) == len(results[1]) == 6 * (1 + len(SAME))
    assert all(map(torch.equal, *results))


def test_ranks_add_up_the_gradients_of_the_same_rows():
    """Also where a loss of the caller is 0 at one row on the one rank, at another on the other."""
    for whole, split in on_ranks(2, other_rows_on_ranks):
        torch.testing.assert_close(split, whole)


def test_a_likely_token_has_its_digits(backend):
    z = torch.tensor([17.0, 0, -1, -2], dtype=torch.float64)
    logprobs = z.log_softmax(0)
    probs, entropy = logprobs.exp(), -(logprobs.exp() * logprobs).sum()
    of_logprob = -probs + torch.tensor([1, 0, 0, 0])
    of_entropy = -probs * (logprobs + entropy)
    for rank, found in enumerate(on_ranks(2, likely_on_ranks, backend)):
        own = slice(2 * rank, 2 * rank + 2)
        expected = (logprobs[:1], of_logprob[own], entropy[None], of_entropy[own])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=0)


def test_ranks_that_disagree_about_a_setting_all_raise():
    names = ("torch.is_grad_enabled()", "autocast", "backend", "the function")
    for texts in on_ranks(2, other_settings_on_ranks):
        for text, name in zip(texts, names, strict=True):
            assert text.startswith(f"ValueError: {name} must be the same on every rank")


def test_functions_are_told_apart_by_what_they_do():
    def make(factor, power=1):
        return lambda new, old, ref, a: -(new - old).exp() * a * factor**power

    alike = [make(2.0), make(2.0)]
    others = [
        make(3.0),
        make(2.0, 2),
        make(torch.ones(2)),
        lambda new, old, ref, a: -(new - old).exp() * a,
        lambda new, old, ref, a: -(new - old).log() * a,
        lambda new, old, ref, a: -(new - old).exp() * a * 3,
        lambda new, old, ref, a, by=3: -(new - old).exp() * a,
        functools.partial(make, 2.0),
        functools.partial(make, 3.0),
        torch.exp,
        torch.nn.Softplus(1.0),
        torch.nn.Softplus(2.0),
        torch.nn.Linear(1, 1),
    ]
    one, two, *texts = map(described, alike + others)
    assert one == two
    assert len({one, *texts}) == 1 + len(others)
    assert not any("0x" in text for text in (one, *texts))


@pytest.mark.parametrize("further", [(), ("sum_sq_probs",)])
def test_a_statistic_has_a_gradient_in_every_form_or_in_none(backend, further):
    """Of one that the kernels do not know yet it raises instead of being lost."""
    if backend == "reference" and further:
        pytest.skip("without a group its gradients are autograd's")
    expected = [
        name in (*_row_stats.DIFFERENTIABLE, *further) for name in fastrl.TokenStats._fields
    ]
    for rank in on_ranks(2, gradients_on_ranks, backend, further):
        assert len(rank) == 4
        for requires, ending in rank:
            assert requires == expected
            assert (ending == "done") == (not further), ending


def test_a_rank_that_dies_ends_the_others():
    with pytest.raises(AssertionError, match=r"(?s)rank 0: .*RuntimeError.*rank 1: died"):
        on_ranks(2, dying_on_ranks)


def test_reduce_hidden_gradient_has_an_effect_with_a_group_alone():
    with pytest.raises(ValueError, match="reduce_hidden_gradient=False has no effect without"):
        fastrl.linear_token_logprobs(
            torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), reduce_hidden_gradient=False
        )
