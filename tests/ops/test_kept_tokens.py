"""Rows that have kept a part of the vocabulary: sets, values against a full softmax, memory."""

from itertools import pairwise
from types import SimpleNamespace as Output

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastrl
from fastrl import KeptTokens
from fastrl.checks import INTEGERS
from fastrl.ops._head import kept_products as products
from fastrl.ops._rows.statistics import OF_ROW

pytestmark = pytest.mark.kernels
V, WIDTH, ROWS = 400, 24, 18
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sets_of(count, token_ids, vocabulary=V):
    """``count`` tokens of each row, of most with its own; None: of some rows none or all."""
    counts = torch.full(token_ids.shape, count or 0)
    if count is None:
        counts = torch.randint(vocabulary // 4, token_ids.shape)
        counts[::5], counts[1] = 0, vocabulary
    sets = []
    for row, token in enumerate(token_ids.tolist()):
        order = torch.randperm(vocabulary).tolist()
        if row % 4:
            order.remove(token)
            order.insert(0, token)
        sets.append(order[: counts[row]])
    return KeptTokens.from_lists(sets)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_with_some_rows_of_a_head(backend, dtype, monkeypatch):
    """All matrices are parts of wider ones, and one id has many terms, over blocks of them.

    A sum of n terms is off by less than n 2^-24 of the sum of their sizes.
    """
    monkeypatch.setattr(products, "_AT_ONCE", 2000)  # two columns, or 20 terms
    rows, count, width, heads = 11, 22, 90, 40

    def part(height, breadth, **options):
        return torch.randn(height, breadth + 3, **options)[:, 1 : breadth + 1]

    ids = torch.randint(-1, heads, (rows, count), dtype=torch.int32)
    ids[:, 3:20] = 6
    matrix, states, factors = part(heads, width, dtype=dtype), part(rows, width), part(rows, count)
    member = (ids[..., None] == torch.arange(heads)).double()
    cases = {
        "gathered_dots_": ("ch,rh,ckr->ck", states, matrix),
        "gathered_sums_": ("ck,rh,ckr->ch", factors, matrix),
        "scattered_sums_": ("ck,ch,ckr->rh", factors, states),
    }
    for name, (formula, *given) in cases.items():
        exact = [x.double() for x in given]
        wanted = torch.einsum(formula, *exact, member)
        sizes = torch.einsum(formula, *(x.abs() for x in exact), member)
        out = part(*wanted.shape)
        around, before = out._base, out._base.clone()
        products._call(name, backend, out, *given, ids)
        error = (out.double() - before[:, 1:-2].double() - wanted).abs()
        assert (error <= 200 * 2**-24 * (sizes + before[:, 1:-2].abs())).all(), name
        out.copy_(before[:, 1:-2])
        assert torch.equal(around, before), name


def test_statistics_of_equal_logits(backend):
    kept = KeptTokens.from_lists([[0, 3, 5], [], [2]])
    outputs = OF_ROW
    ids = torch.tensor([5, 1, 2])
    stats = fastrl.token_stats(torch.ones(3, 8), ids, outputs=outputs, kept=kept, backend=backend)
    counts = torch.tensor([3.0, 8.0, 1.0])
    torch.testing.assert_close(stats.logprobs, -counts.log())
    torch.testing.assert_close(stats.entropy, counts.log())
    torch.testing.assert_close(stats.logsumexp, 1 + counts.log())
    torch.testing.assert_close(stats.sum_sq_probs, 1 / counts)
    assert stats.is_top1.all()


def test_a_token_that_its_set_lacks_is_a_member(backend):
    logits, ids = torch.tensor([[0.0, 9.0, 1.0, 2.0]]), torch.tensor([3])
    kept = KeptTokens.from_lists([[0]])
    found = fastrl.token_logprobs(logits, ids, kept=kept, backend=backend)
    torch.testing.assert_close(found, torch.tensor([2.0 - torch.tensor([0.0, 2.0]).logsumexp(0)]))
    assert kept.lacking(ids).tolist() == [True]
    assert kept.lacking(torch.tensor([0])).tolist() == [False]
    assert kept.lacking(torch.tensor([-1])).tolist() == [False]  # of a row that does not count


def test_rows_of_the_head_that_nobody_kept_have_no_effect(backend):
    hidden, weight = torch.randn(5, WIDTH), torch.randn(V, WIDTH)
    weight[100:] = torch.nan
    ids = torch.randint(100, (5,))
    kept = KeptTokens.from_lists([[*range(row, 100, 9)] for row in range(5)])
    leaf = weight.clone().requires_grad_()
    logprobs = fastrl.linear_token_logprobs(hidden, leaf, ids, kept=kept, backend=backend)
    logprobs.sum().backward()
    assert logprobs.isfinite().all()
    assert leaf.grad[:100].isfinite().all()
    assert (leaf.grad[100:] == 0).all()


class Largest(TorchDispatchMode):
    """The most elements that a tensor made in the block has."""

    elements = 0

    def __torch_dispatch__(self, operator, kinds, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        given, made = (
            {
                x.untyped_storage().data_ptr(): x.numel()
                for x in tree_leaves(tree)
                if torch.is_tensor(x)
            }
            for tree in (args, result)
        )
        self.elements = max(self.elements, *(n for at, n in made.items() if at not in given), 0)
        return result


@pytest.mark.not_on("triton", "cuda")
def test_nothing_has_the_size_of_the_vocabulary(backend):
    """With a frozen head: its gradient would have."""
    vocabulary, kept_of_row = 20_000, 6
    hidden, weight = torch.randn(30, 8, requires_grad=True), torch.randn(vocabulary, 8)
    ids = torch.randint(vocabulary, (30,))
    kept = sets_of(kept_of_row, ids, vocabulary)
    arguments = hidden, weight, ids, torch.randn(30), torch.ones(30)
    with Largest() as largest:
        fastrl.linear_policy_loss(
            *arguments, kept=kept, objective="dapo", backend=backend
        ).loss.backward()
    gathered = 30 * (kept_of_row + 1) * 8 if backend == "reference" else 0
    assert largest.elements <= max(gathered, hidden.numel(), 4 * len(kept.token_ids))


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_a_compiled_graph_checks_the_values_of_sets(form, request):
    if form == "logits":
        request.getfixturevalue("compiled")  # plain PyTorch has no operator that could check

    def call(ids, kept):
        if form == "logits":
            return fastrl.token_logprobs(torch.zeros(1, V), ids, kept=kept).exp()
        return fastrl.linear_token_logprobs(torch.zeros(1, 8), torch.ones(V, 8), ids, kept=kept)

    compiled = torch.compile(call, backend="aot_eager")
    for sets, token, message in (
        ([[3, 5, 5]], 3, "not repeat an id within a set, got id 5 twice in row 0"),
        ([[3, V]], 3, f"kept.token_ids must lie in .*, got {V} in the set of row 0"),
        ([[3, 5]], V, f"token_ids must lie in .*, got {V} at"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled(torch.tensor([token]), KeptTokens.from_lists(sets))
    assert compiled(torch.tensor([3]), KeptTokens.from_lists([[3, 5]])).exp() >= 0.5


def test_sets_from_padded_ids():
    padded = torch.tensor([[[4, 2, -1], [-1, -1, -1]], [[-1, 7, 3], [5, -1, -1]]])
    kept = KeptTokens.from_padded(padded)
    assert kept.token_ids.tolist() == [4, 2, 7, 3, 5]
    assert kept.offsets.tolist() == [0, 2, 2, 4, 5]
    assert KeptTokens.from_padded(padded[0], padding=4).counts().tolist() == [2, 3]
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        for end in (torch.iinfo(dtype).min, torch.iinfo(dtype).max):
            rows = torch.tensor([[5, end, end], [end, 6, 7]], dtype=dtype)
            kept = KeptTokens.from_padded(rows, padding=end)
            assert kept.token_ids.tolist() == [5, 6, 7]
            assert kept.counts().tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_sets_of_any_integers(backend, dtype):
    """Offsets that fall or do not span the ids are refused wherever they are read."""
    ids, token_ids = torch.tensor([3, 1, 2, 4], dtype=dtype), torch.tensor([1, 5, 4])
    kept = KeptTokens(ids, torch.tensor([0, 2, 2, 4], dtype=dtype))
    assert kept.counts().dtype == torch.int64
    wanted = KeptTokens.from_lists([[3, 1], [], [2, 4]])
    logits, head = torch.randn(3, 6), torch.eye(6)
    reads = {
        "logits": lambda one: fastrl.token_logprobs(logits, token_ids, kept=one, backend=backend),
        "hidden": lambda one: fastrl.linear_token_logprobs(
            logits, head, token_ids, kept=one, backend=backend
        ),
        "lacking": lambda one: one.lacking(token_ids),
        "take": lambda one: one.take(torch.tensor([2, 0])).token_ids.long(),
        "counts": lambda one: one.counts(),
    }
    for name, read in reads.items():
        assert torch.equal(read(kept), read(wanted)), name
        for offsets in ([1, 2, 2, 4], [0, 2, 2, 3], [0, 3, 2, 4]):
            wrong = kept._replace(offsets=torch.tensor(offsets, dtype=dtype))
            if name == "counts":
                assert read(wrong).tolist() == [b - a for a, b in pairwise(offsets)]
                continue
            with pytest.raises(ValueError, match=r"kept\.offsets must rise from 0 to the number"):
                read(wrong)


def test_sets_from_vllm():
    nested = Output(token_ids=[9, 8], sampling_mask=Output(token_ids=[[9, 1], [8]]))
    flat = Output(
        token_ids=[7, 6, 5],
        sampling_mask=Output(token_ids=[7, 2, 6, 5, 3], offsets=[0, 2, 3, 5]),
    )
    without = Output(token_ids=[4], sampling_mask=None)
    kept = KeptTokens.from_vllm([nested, flat, without])
    assert kept.counts().tolist() == [2, 1, 0, 2, 1, 2, 0, 0, 0]
    assert kept.token_ids.tolist() == [9, 1, 8, 7, 2, 6, 5, 3]
    assert KeptTokens.from_vllm([nested, flat], length=2).counts().tolist() == [2, 1, 2, 1]
    assert KeptTokens.from_vllm([nested, flat], length=0).offsets.tolist() == [0]
    flat.sampling_mask.offsets = [0, 0, 5, 5]  # the first and the last of the whole vocabulary
    assert KeptTokens.from_vllm([flat]).counts().tolist() == [0, 5, 0]
    nested.sampling_mask.token_ids.pop()
    with pytest.raises(ValueError, match="2 tokens and 1 sets at 1"):
        KeptTokens.from_vllm([flat, nested])
    for offsets in ([0, 2, 3], [0, 3, 2, 5], [1, 2, 3, 5]):
        flat.sampling_mask.offsets = offsets
        with pytest.raises(ValueError, match="offsets that rise from 0 to the number of ids 5"):
            KeptTokens.from_vllm([flat])


def test_sets_from_sglang():
    masks, key = ([[1, 9], [8]], [[5, 7, 6]]), "output_token_sampling_mask"
    outputs = [{"output_ids": [ids[0] for ids in x], "meta_info": {key: x}} for x in masks]
    kept = KeptTokens.from_sglang(outputs)
    assert kept.counts().tolist() == [2, 1, 3, 0]
    assert kept.token_ids.tolist() == [1, 9, 8, 5, 7, 6]
    assert KeptTokens.from_sglang(outputs, length=1).counts().tolist() == [2, 3]
    outputs[1]["output_ids"].append(4)
    with pytest.raises(ValueError, match="2 tokens and 1 sets at 1"):
        KeptTokens.from_sglang(outputs)


def test_sets_taken_and_joined():
    kept = KeptTokens.from_lists([[3, 1], [], [2, 5, 4], [6]])
    for dtype in INTEGERS:  # torch's own index of uint8 is a mask
        taken = kept.take(torch.tensor([2, 1, 0, 2], dtype=dtype))
        assert taken.token_ids.tolist() == [2, 5, 4, 3, 1, 2, 5, 4]
        assert taken.offsets.tolist() == [0, 3, 3, 5, 8]
    assert kept.take(torch.tensor([-2])).token_ids.tolist() == [2, 5, 4]
    lists = ([3, 1], (), np.array([2, 5, 4]), torch.tensor([6], dtype=torch.uint8))
    for sets in (iter(lists), lists, [[np.int64(i) for i in one] for one in lists]):
        assert all(map(torch.equal, KeptTokens.from_lists(sets), kept))
    some = kept.take(torch.tensor([True, False, False, True]))
    assert some.token_ids.tolist() == [3, 1, 6]
    both = KeptTokens.concatenate([some, taken])
    assert both.counts().tolist() == [2, 1, 3, 0, 2, 3]
    assert both.token_ids.tolist() == [3, 1, 6, 2, 5, 4, 3, 1, 2, 5, 4]
    assert KeptTokens.from_lists([]).take(torch.tensor([], dtype=torch.int64)).offsets.tolist() == [
        0
    ]


@pytest.mark.parametrize("count", [3, V // 2, 0])
def test_clipped_rows_have_no_gradient(backend, count):
    """Among rows that have one, of which the chunk is then."""
    ids = torch.randint(V, (12,))
    kept, clipped = sets_of(count, ids), torch.arange(12) % 3 == 1
    hidden, weight = torch.randn(12, WIDTH), torch.randn(V, WIDTH) / 5
    old = fastrl.linear_token_logprobs(hidden, weight, ids, kept=kept, backend="reference")
    found = []
    for mask in (torch.ones(12), (~clipped).float()):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        fastrl.linear_policy_loss(
            *(x, w, ids, torch.ones(12), mask),
            old_logprobs=torch.where(clipped, old - 1, old),  # a ratio of e
            kept=kept,
            objective="dapo",
            normalizer=12.0,
            backend=backend,
        ).loss.backward()
        found.append((x.grad, w.grad))
    assert (found[0][0][clipped] == 0).all()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
