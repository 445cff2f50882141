"""A vocabulary that is split over gloo ranks gives what one process gives."""

import contextlib
import random
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fastrl
from fastrl.ops._head import kept_products
from fastrl.ops._head.products import ConvertedProducts
from fastrl.ops._lens.rows import Exchange
from fastrl.ops._rows import order as row_order
from fastrl.ops._rows import statistics as row_statistics
from fastrl.ops._rows.projected import ProjectedRows
from fastrl.ops._rows.statistics import OF_ROW
from tests.calls.combined import cases
from tests.calls.table import ROWS as TABLE
from tests.ops.ranks.gloo_ranks import on_ranks
from tests.ops.ranks.vocabulary_ranks import (
    ROWS,
    batch,
    cases_on_ranks,
    columns,
    leaves,
    teachers_on_ranks,
)

#: Sizes of parts; one has a single column, which rows and a bias exclude.
SPLITS = [(32, 32), (1, 310), (104, 104, 103), (80, 1, 150, 80)]
FEW = (80, 1, 240)
#: Rows of the table: everything that turns logits into log-probabilities, teachers, samplers.
ROWS_ON_RANKS = [
    *("token_stats: scale, softcap, temperature", "token_stats: beside a teacher"),
    *("token_stats: beside tokens of a teacher", "token_divergence: unusual rows"),
    *("logits_policy_loss", "logits_policy_loss: centered rows"),
    *("linear_token_stats: beside a teacher", "linear_token_stats: beside tokens of a teacher"),
    *("linear_policy_loss: heads", "linear_policy_loss: frozen, autocast"),
    "linear_policy_loss: centered rows",
]


def drawn(backend, name, most):
    """Lines of cases of a row."""
    function, options = TABLE[name]
    options = {key: x for key, x in options.items() if key not in ("vocabulary", "threads", "some")}
    return [repr(case.changed(threads=1)) for case in cases(backend, function, options)[:most]]


def assert_split(backend, given):
    """Compare cases with the oracle, and the results of all ranks with each other, bit for bit."""
    first, *others = on_ranks(len(given[0][0]), cases_on_ranks, backend, given)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert torch.equal(one.nan_to_num(-7.0), two.nan_to_num(-7.0))


@pytest.mark.parametrize("name", ROWS_ON_RANKS)
@pytest.mark.parametrize(
    "sizes", [FEW, *(pytest.param(x, marks=pytest.mark.slow) for x in SPLITS)], ids=str
)
def test_equal_to_the_whole_vocabulary_and_on_all_ranks(backend, sizes, name):
    lines = drawn(backend, name, 5 if backend == "reference" else 10)
    assert_split(backend, [(sizes, line) for line in lines])


@pytest.mark.parametrize("world", [2, 3])
def test_random_parts(backend, world):
    chance, given = random.Random(world), []
    for name in ROWS_ON_RANKS:
        for line in drawn(backend, name, 1):
            sizes = (
                int(chance.choice((1, 3, 40, 300)) * chance.uniform(1, 2)) for _ in range(world)
            )
            given.append((tuple(sizes), line))
    assert_split(backend, given)


def test_a_group_of_one_has_the_whole_vocabulary(backend):
    assert_split(
        backend, [((37,), line) for name in ROWS_ON_RANKS for line in drawn(backend, name, 2)]
    )


def test_losses_beside_a_teacher(backend):
    first, *others = on_ranks(3, teachers_on_ranks, backend, FEW)
    for other in others:
        assert all(map(torch.equal, first, other))


@contextlib.contextmanager
def happened(*functions):
    """The calls of functions in a block, a letter (or word) of each."""
    letters = []

    def noted(plain, letter):
        def run(*arguments, **options):
            letters.append(letter)
            return plain(*arguments, **options)

        return run

    with contextlib.ExitStack() as stack:
        for owner, name, letter in functions:
            noted_call = noted(getattr(owner, name), letter)
            stack.enter_context(mock.patch.object(owner, name, noted_call))
        yield letters


def collectives_on_ranks(sizes, backend):
    """The collectives of each call, without and with those of its backward; an order of events."""
    own, counts, gradients = columns(sizes), {}, {}
    head, tokens = batch(sum(sizes))
    ids, mask, group = tokens["token_ids"], tokens["mask"], dist.group.WORLD
    tokens = {"token_ids": ids, "mask": mask, "chunk_tokens": 10, "compact": False}
    tokens |= {"bias": head["bias"][own], "backend": backend, "vocab_group": group}
    tensors = {"hidden": head["hidden"], "weight": head["weight"][own]}

    def loss(x, **more):
        given = {"advantages": torch.ones(ROWS), "objective": "dapo", **tokens, **more}
        return fastrl.linear_policy_loss(**x, **given).loss

    def logprobs(x, **more):
        return fastrl.linear_token_logprobs(**x, **tokens, **more).sum()

    def from_logits(x):
        logits = torch.where(mask[:, None], x["hidden"], 0.0) @ x["weight"].t()
        more = {"vocab_group": group, "objective": "dapo", "backend": backend}
        return fastrl.logits_policy_loss(logits, ids, torch.ones(ROWS), mask, **more).loss

    partial = {"reduce_hidden_gradient": False}
    for name, call, more in (
        ("loss", loss, {}),
        ("loss, partial", loss, partial),
        ("logprobs", logprobs, {}),
        ("logprobs, partial", logprobs, partial),
        ("logits", from_logits, {}),
    ):
        x = leaves(tensors)
        collectives = [(dist, name, name) for name in ("all_gather", "all_reduce")]
        with happened(*collectives) as letters:
            result = call(x, **more)
            forward = dict(Counter(letters))
            result.backward()
        counts[name] = forward, dict(Counter(letters))
        gradients[name] = x["hidden"].grad
    dist.all_reduce(gradients["loss, partial"])
    torch.testing.assert_close(gradients["loss, partial"], gradients["loss"])
    with happened(
        (ProjectedRows, "_chunk", "P"),
        (Exchange, "__init__", "S"),
        (Exchange, "result", "W"),
    ) as letters:
        loss(tensors)
    return counts, "".join(letters)


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
        # the next chunk is projected (P) before the ranks send (S) and wait for each other (W)
        assert order == "PS" + "PSW" * (chunks - 1) + "W"


def twice_on_ranks(backend):
    """The same call twice, in float16 and, on the reference backend, in float64."""
    own, group, losses = columns((150, 161)), dist.group.WORLD, []
    dtype = torch.float64 if backend == "reference" else torch.float16
    head, tokens = batch(311, dtype)
    for split in (False, True, True):
        weight = head["weight"][own] if split else head["weight"]
        x = leaves({"hidden": head["hidden"], "weight": weight})
        more = {"objective": "dapo", "chunk_tokens": 8, "backend": backend}
        more |= {"vocab_group": group} if split else {}
        result = fastrl.linear_policy_loss(**x, **tokens, **more)
        result.loss.backward()
        losses.append([result.loss.detach(), result.logprobs, x["hidden"].grad, x["weight"].grad])
    whole, first, second = losses
    assert all(map(torch.equal, first, second))
    rtol = 1e-14 if dtype == torch.float64 else 2e-3
    whole[3] = whole[3][own]
    for found, expected in zip(first, whole, strict=True):
        size = float(expected.abs().amax())
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * size)


def test_two_runs_are_bit_equal_in_any_dtype(backend):
    on_ranks(2, twice_on_ranks, backend)


def compiled_on_ranks():
    """Calls under torch.compile, which breaks the graph where ranks exchange their sizes."""
    own, group = columns((20, 17)), dist.group.WORLD
    head, tokens = batch(37)
    ids, mask = tokens["token_ids"], tokens["mask"]

    def from_hidden(x):
        more = {"objective": "dapo", "vocab_group": group}
        loss = fastrl.linear_policy_loss(**x, token_ids=ids, advantages=weights, mask=mask, **more)
        return loss.loss * 2.0

    def from_logits(x):
        logits = torch.where(mask[:, None], x["hidden"], 0.0) @ x["weight"].t()
        return fastrl.token_logprobs(logits, ids, mask=mask, vocab_group=group) @ weights

    weights = torch.randn(ROWS)
    for function, graphs in ((from_hidden, 1), (from_logits, 2)):
        results = []
        torch._dynamo.utils.counters.clear()
        for run in (function, torch.compile(function, backend="aot_eager")):
            x = leaves({"hidden": head["hidden"], "weight": head["weight"][own]})
            result = run(x)
            result.backward()
            results.append([result.detach(), *(leaf.grad for leaf in x.values())])
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two)
        breaks = torch._dynamo.utils.counters["graph_break"]
        assert any("exchange the sizes" in reason for reason in breaks), breaks
        # what is around the call is compiled; the call itself, which other ranks share, is not
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_compiled_graph_breaks_where_sizes_are_exchanged():
    on_ranks(2, compiled_on_ranks)


def other_rows_on_ranks():
    """Gradients of hidden states where a loss leaves out one row on the one rank, another there."""
    rank, group = dist.get_rank(), dist.group.WORLD
    hidden, weight, ids = torch.randn(6, 8), torch.randn(10, 8), torch.arange(6)
    found = []
    for head, more in ((weight, {}), (weight[columns((5, 5))], {"vocab_group": group})):
        states = hidden.clone().requires_grad_()
        logprobs = fastrl.linear_token_logprobs(states, head, ids, **more)
        slopes = torch.ones(6)
        if more:
            slopes[5 * rank] = 0.0
        (slopes @ logprobs).backward()
        found.append(states.grad)
    return [x[1:5] for x in found]


def test_ranks_add_up_the_gradients_of_the_same_rows():
    """Also where a loss of the caller is 0 at one row on the one rank, at another on the other."""
    for whole, split in on_ranks(2, other_rows_on_ranks):
        torch.testing.assert_close(split, whole)


def own_slopes_on_ranks(backend):
    """Gradients of weights where each rank's loss leaves out other rows and other statistics."""
    rank, group, ids = dist.get_rank(), dist.group.WORLD, torch.arange(9)
    hidden, weight = torch.randn(9, 8), torch.randn(12, 8)
    top = torch.randn(9, 12).log_softmax(-1).topk(3)
    teacher = fastrl.Teacher.from_top_k(top.indices, top.values)
    more = {"outputs": ("logprobs", "divergence"), "teacher": teacher, "chunk_tokens": 4}
    split = {"vocab_group": group, "reduce_hidden_gradient": False}
    for uses_divergence in (True, rank == 0, False):
        grads = []
        for own, given in ((slice(None), {}), (columns((5, 7)), split)):
            w = weight[own].clone().requires_grad_()
            stats = fastrl.linear_token_stats(hidden, w, ids, **more, **given, backend=backend)
            x = stats.logprobs + stats.divergence if uses_divergence else stats.logprobs
            (x * ((ids + rank) % 4 > 0)).sum().backward()
            grads.append(w.grad)
        torch.testing.assert_close(grads[1], grads[0][columns((5, 7))], rtol=1e-5, atol=1e-6)


def test_a_part_has_the_gradient_of_its_own_loss(backend):
    """The ranks work on the same rows of a teacher's tokens, whichever rows each loss has."""
    on_ranks(2, own_slopes_on_ranks, backend)


def tiles_on_ranks():
    """Kept tokens on two CPUs, of which one multiplies a matrix on tiles."""
    hidden, weight, ids = torch.randn(40, 32), torch.randn(1024, 32), torch.arange(40)
    kept = fastrl.KeptTokens.from_lists([torch.randperm(1024)[:30] for _ in ids])
    row_order._CPU_CHUNK_BYTES, kept_products._CHUNK_BYTES = 4 * 1024 * 20, (32768, 32768)
    if dist.get_rank() == 0:
        kept_products.TileProducts = ConvertedProducts
    expected = fastrl.linear_token_logprobs(hidden, weight, ids, kept=kept)
    more = {"kept": kept, "vocab_group": dist.group.WORLD}
    found = fastrl.linear_token_logprobs(hidden, weight[columns((600, 424))], ids, **more)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_ranks_on_different_cpus_have_the_same_chunks():
    on_ranks(2, tiles_on_ranks)


def partial_on_ranks():
    """Gradients of hidden states by each function, whole, summed over ranks and in parts."""
    own, group = columns((5, 8)), dist.group.WORLD
    hidden, weight, ids = torch.randn(6, 8), torch.randn(13, 8), torch.arange(6)
    other, head, found = torch.randn(6, 4), torch.randn(13, 4), {}
    policy = {"advantages": torch.ones(6), "mask": torch.ones(6), "objective": "dapo"}
    functions = {
        "stats": lambda *x, **more: fastrl.linear_token_stats(*x, ids, **more).entropy.sum(),
        "logprobs": lambda *x, **more: fastrl.linear_token_logprobs(*x, ids, **more).sum(),
        "loss": lambda *x, **more: fastrl.linear_policy_loss(*x, ids, **policy, **more).loss,
        "divergence": lambda *x, **more: fastrl.linear_divergence(
            *x, fastrl.Teacher.from_hidden(other, head[own] if len(x[1]) < 13 else head), **more
        ).sum(),
    }
    for name, function in functions.items():
        with pytest.raises(ValueError, match="reduce_hidden_gradient=False has no effect without"):
            function(hidden, weight, reduce_hidden_gradient=False)
        for more in ({}, {"reduce_hidden_gradient": True}, {"reduce_hidden_gradient": False}):
            states = hidden.clone().requires_grad_()
            more |= {"vocab_group": group} if more else {}
            function(states, weight[own] if more else weight, **more).backward()
            found.setdefault(name, []).append(states.grad)
    return found


def test_every_linear_form_leaves_the_gradient_in_parts_if_asked():
    one, other = on_ranks(2, partial_on_ranks)
    for name, (whole, summed, part) in one.items():
        torch.testing.assert_close(summed, whole, msg=name)
        assert (part - whole).abs().max() > 1e-3, name
        torch.testing.assert_close(part + other[name][2], whole, msg=name)


def likely_on_ranks(backend, lead):
    """A token that leads by so many nats: its log-probability, entropy and their gradients."""
    rank, token_ids = dist.get_rank(), torch.zeros(1, dtype=torch.int64)
    own = torch.tensor([[lead, 0.0], [-1.0, -2.0]])[rank : rank + 1].requires_grad_()
    more = {"outputs": ("logprobs", "entropy"), "backend": backend}
    stats = fastrl.token_stats(own, token_ids, vocab_group=dist.group.WORLD, **more)
    found = []
    for stat in stats[:2]:
        (grad,) = torch.autograd.grad(stat.sum(), own, retain_graph=True)
        found += [stat.detach(), grad.flatten()]
    return found


@pytest.mark.parametrize("lead", [17.0, 45.0])
def test_a_likely_token_has_its_digits(backend, lead):
    below = torch.tensor([0, -lead, -1 - lead, -2 - lead], dtype=torch.float64)
    logprobs = below - below[1:].exp().sum().log1p()
    probs, entropy = logprobs.exp(), -(logprobs.exp() * logprobs).sum()
    of_logprob = torch.cat([-logprobs[:1].expm1(), -probs[1:]])
    of_entropy = -probs * (logprobs + entropy)
    for rank, found in enumerate(on_ranks(2, likely_on_ranks, backend, lead)):
        own = slice(2 * rank, 2 * rank + 2)
        expected = (logprobs[:1], of_logprob[own], entropy[None], of_entropy[own])
        if lead > 17:  # the entropy there is the rounding of what cancels
            expected = expected[:2]
        for one, other in zip(found, expected, strict=False):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=0)


def gradients_on_ranks(backend, further):
    """Which statistics have a gradient and how a backward ends: whole, and split over ranks."""
    row_statistics.DIFFERENTIABLE += further
    ids, found, rank = torch.arange(6) % 5, [], dist.get_rank()
    for function, tensors in (
        (fastrl.token_stats, [torch.randn(6, 5) + rank]),
        (fastrl.linear_token_stats, [torch.randn(6, 8), torch.randn(5, 8) + rank]),
    ):
        tensors[0].requires_grad_()
        for group in (None, dist.group.WORLD):
            more = {"outputs": OF_ROW, "vocab_group": group, "backend": backend}
            stats = function(*tensors, ids, **more)[: len(OF_ROW)]
            try:
                sum(x.sum() for x in stats if x.requires_grad).backward()
                ending = "done"
            except (TypeError, ValueError, RuntimeError) as error:
                ending = type(error).__name__
            found.append(([x.requires_grad for x in stats], ending))
    return found


@pytest.mark.parametrize("further", [(), ("sum_sq_probs",)])
def test_a_statistic_has_a_gradient_in_every_form_or_in_none(backend, further):
    """Of one that the kernels do not know yet it raises instead of being lost."""
    if backend == "reference" and further:
        pytest.skip("without a group its gradients are autograd's")
    expected = [name in (*row_statistics.DIFFERENTIABLE, *further) for name in OF_ROW]
    for rank in on_ranks(2, gradients_on_ranks, backend, further):
        for requires, ending in rank:
            assert requires == expected
            assert (ending == "done") == (not further), ending
