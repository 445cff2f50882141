"""The kernels on rows of logits, of every shape that a row is split into, against float64."""

from math import inf, nan

import pytest
import torch

from fastrl import reference
from fastrl.contract import LossArguments
from fastrl.library import operators
from fastrl.ops._rows.statistics import OF_ROW
from tests.calls.case import Case
from tests.calls.combined import assert_value
from tests.gpu.rows import (
    loss_of,
    make_rows,
    objective_of,
    one_pass,
    rows_of,
    saved,
    shared_out,
    token_stats,
)

pytestmark = pytest.mark.kernels_alone  # their kernels have other shapes

#: of one part and of many; a whole block of Triton's and a tail, and more parts than a cluster of
#: CUDA has blocks
VOCABULARIES = (1, 37, 1000, 1003, 5001, 20_000, 33_000)
#: dtype, layout and other options, if not with each other; Triton and long rows take one of them
KINDS = [
    {"dtype": "float32", "logits_layout": "sliced", "temperature": "per-token"},
    {"dtype": "bfloat16", "logits_layout": "odd", "logit_scale": 1.5, "logit_softcap": 8.0},
    {"dtype": "float16", "logits_layout": "shifted", "inplace": True},
]
STATISTICS = {"outputs": OF_ROW, "upstream": "some-zero"}
LOSS = {"old": "near", "ref": "near", "policy_weights": "token", "upstream": "random"}
LOSS |= {"fields": {"kl_coef": 0.1, "kl_gradient": "bias-corrected", "entropy_coef": 0.02}}
FORMS = {"token_stats": STATISTICS, "logits_policy_loss": LOSS}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("V", VOCABULARIES)
@pytest.mark.parametrize("function", FORMS)
def test_values_and_gradients_are_those_of_the_oracle(backend, monkeypatch, function, V, shared):
    rows = {"tokens": 4, "mask": "ragged", "masked_values": "nan", "spread": 3.0, "vocabulary": V}
    with shared_out(backend, monkeypatch, shared):
        first = (VOCABULARIES.index(V) + 2) % len(KINDS)
        for kind in KINDS if V < 10_000 and backend == "cuda" else KINDS[first:][:1]:
            assert_value(backend, Case(function, **rows, **FORMS[function], **kind))


@pytest.mark.parametrize("V", [4096, 5001])
def test_a_row_does_not_depend_on_the_others(backend, V):
    """With fewer rows, more blocks share a row."""
    _, logits, token_ids, mask = make_rows(V, torch.bfloat16, 0, 1, 170)  # 4 blocks each of 40 SMs
    mask[0, 20:40] = False
    loss, objective = loss_of(logits, token_ids, mask)

    def results(logits, token_ids, mask, loss):
        rows = rows_of(token_ids, mask)
        return (
            *token_stats(backend, logits, rows),
            *one_pass(backend, logits, rows, loss, objective),
        )

    every = results(logits, token_ids, mask, loss)
    for few in (slice(0, 100), slice(77, 90), slice(41, 42)):
        own = LossArguments._make(None if x is None else x[:, few].clone() for x in loss)
        found = results(*(x[:, few].clone() for x in (logits, token_ids, mask)), own)
        for some, all_of_them in zip(found, every, strict=True):
            assert torch.equal(some, all_of_them[:, few])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("V", [4096, 5001])
def test_broken_rows(backend, monkeypatch, V, shared):
    """NaN, infinities and ids outside, at which nobody looks before: each breaks its own row."""
    _, logits, token_ids, mask = make_rows(V, torch.float32, 0, 1, 9)
    loss = loss_of(logits, token_ids, mask)
    clean = one_pass(backend, logits, rows_of(token_ids, mask), *loss)
    logits[0, 1, 3] = nan
    logits[0, 2, V - 1] = inf
    logits[0, 3] = -inf
    token_ids[0, 4:6] = torch.tensor([V, -1])
    logits[0, 6, V // 2 :] = -inf  # whole threads see nothing else
    token_ids[0, 6] = 5
    logits[0, 7, token_ids[0, 7]] = -inf
    rows = rows_of(token_ids, mask)
    with shared_out(backend, monkeypatch, shared):
        logprobs, entropy, grad = one_pass(backend, logits, rows, *loss)
    assert logprobs[0, 1:6].isnan().all()
    assert entropy[0, 1:4].isnan().all()
    assert grad[0, 1:4].isnan().all()
    assert grad[0, 4:6].isnan().any(-1).all()
    assert torch.equal(logprobs[0, 0], clean[0][0, 0])
    assert torch.equal(grad[0, 0], clean[2][0, 0])
    expected = logits[0, 6].double().log_softmax(-1)
    assert abs(logprobs[0, 6] - expected[5]) < 2e-6
    assert abs(entropy[0, 6] - torch.distributions.Categorical(logits=expected).entropy()) < 5e-6
    assert not grad[0, 6, V // 2 :].any()
    assert grad[0, 6].isfinite().all()
    assert logprobs[0, 7] == -inf


@pytest.mark.parametrize("V", [40, 4096, 5001])
def test_rows_without_a_gradient_are_zeros(backend, V):
    _, logits, token_ids, mask = make_rows(V, torch.bfloat16, 0, 1, 8)
    loss, _ = loss_of(logits, token_ids, mask)
    loss.advantages[0, 1] = loss.weights[0, 2] = loss.policy_weights[0, 3] = 0
    *_, grad = one_pass(backend, logits, rows_of(token_ids, mask), loss, objective_of())
    assert not grad[0, 1:4].any()
    assert not grad[~mask].any()
    assert grad[0, 0].any()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "bounds",
    [None, (0, 0, 2, 3, 3, 11, 12, 12), (0, *[1] * 9, 2, 5, *[6] * 20, 9, *[12] * 4)],
    ids=["padded", "packed", "many empty"],
)
def test_constants_per_sequence_are_those_of_its_tokens(backend, monkeypatch, bounds, shared):
    B, T, count, cu_seqlens = 4, 3, 4, None
    if bounds is not None:
        B, T, count = 1, 12, len(bounds) - 1
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    _, logits, token_ids, mask = make_rows(1000, torch.float32, 0, B, T)
    rows, (per_token, objective) = (
        rows_of(token_ids, mask),
        loss_of(logits, token_ids, mask),
    )
    names = ("advantages", "weights", "kl_weights", "entropy_weights", "policy_weights")
    given = {name: torch.randn(count) for name in names}
    of = reference.sequences_of(mask, cu_seqlens)
    spread = {name: of.per_token(x, mask).contiguous() for name, x in given.items()}
    by_sequence = per_token._replace(cu_seqlens=cu_seqlens, **given)
    mixed = by_sequence._replace(
        weights=spread["weights"], entropy_weights=spread["entropy_weights"]
    )
    expected = one_pass(backend, logits, rows, per_token._replace(**spread), objective)
    assert expected[-1].any()
    for loss in (by_sequence, mixed):
        with shared_out(backend, monkeypatch, shared):
            found = one_pass(backend, logits, rows, loss, objective)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.uint8, torch.bfloat16, torch.int64, torch.float64, None],
    ids=str,
)
def test_rows_that_count(backend, dtype):
    """By a mask of any dtype and by their ids: the others are 0, whatever they hold."""
    _, logits, token_ids, _ = make_rows(1000, torch.bfloat16, 0, 2, 3)
    logits = logits.nan_to_num(0.0).contiguous()
    mask = torch.tensor([[True, True, False], [False, True, True]])
    token_ids[0, 1], token_ids[1, 0] = -7, 5000
    given = None if dtype is None else mask.to(dtype)
    if dtype is None:
        token_ids[1, 0] = 3
    elif dtype.is_floating_point:
        given = torch.where(mask, given, -0.0)
    valid = (mask if dtype is not None else torch.ones_like(mask)) & (token_ids != -7)
    logits[~valid] = nan
    rows = rows_of(token_ids, given, ignore_index=-7)
    plain = rows_of(token_ids, valid)
    stats = token_stats(backend, logits, rows)
    for got, want in zip(stats, token_stats(backend, logits, plain), strict=True):
        assert torch.equal(got, want)
        assert not got[~valid].any()
    assert stats.logprobs[valid].isfinite().all()
    grads = [torch.randn(2, 3) for _ in range(3)]
    results = [
        operators(backend).token_stats_bwd(logits, *one, *saved(stats), *grads)
        for one in (rows, plain)
    ]
    assert torch.equal(*results)
    assert not results[0][~valid].any()


def test_logprobs_are_never_above_zero(backend):
    """Also where a token has all of the probability, and where the logits share an offset."""
    for offset in (0.0, -30.0, 1e4):
        logits = torch.full((1, 8, 300), offset - 90.0)
        ids = torch.arange(8)
        logits[0, ids, ids] = offset + torch.rand(8)
        stats = token_stats(backend, logits, rows_of(ids[None], temperature=0.7))
        assert ((stats.logprobs <= 0) & (stats.logprobs > -1e-6)).all()
        assert ((stats.entropy >= 0) & (stats.entropy < 1e-6)).all()


@pytest.mark.not_on("cuda")  # whose entropy of such logits is NaN
def test_logits_of_any_size_have_a_softmax(backend):
    for size in (1e9, 1e12, 1e30):
        logits = size * torch.randn(1, 2, 300)
        stats = token_stats(backend, logits, rows_of(logits.argmax(-1)))
        assert not stats.logprobs.any()
        assert not stats.entropy.any()
