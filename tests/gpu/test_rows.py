"""The kernels on rows of logits, of every shape that a row is split into, against float64."""

import pytest
import torch

from fastrl import reference
from fastrl.contract import LossArguments
from fastrl.ops._rows.statistics import OF_ROW
from tests.calls.case import Case
from tests.calls.combined import assert_value
from tests.gpu.rows import (
    loss_of,
    make_rows,
    one_pass,
    rows_of,
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
ROWS = {"tokens": 4, "mask": "ragged", "masked_values": "nan", "spread": 3.0}
#: Each breaks its own row, or has no gradient; `inf-block` is all that whole threads see.
UNUSUAL = ["nan-one", "positive-inf", "inf-row", "inf-chosen", "inf-block", "zero-advantages"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("V", VOCABULARIES)
@pytest.mark.parametrize("function", FORMS)
def test_values_and_gradients_are_those_of_the_oracle(backend, monkeypatch, function, V, shared):
    with shared_out(backend, monkeypatch, shared):
        first = (VOCABULARIES.index(V) + 2) % len(KINDS)
        for kind in KINDS if V < 10_000 and backend == "cuda" else KINDS[first:][:1]:
            assert_value(backend, Case(function, **ROWS, vocabulary=V, **FORMS[function], **kind))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("V", [4096, 5001])
def test_unusual_rows(backend, monkeypatch, V, shared):
    with shared_out(backend, monkeypatch, shared):
        for feature in UNUSUAL:
            given = {**ROWS, "tokens": 9, "vocabulary": V, "features": (feature,)}
            assert_value(backend, Case("logits_policy_loss", **given, **LOSS))


@pytest.mark.parametrize("mask_dtype", ["bool", "int8", "uint8", "bfloat16", "int64", "float64"])
def test_rows_that_count(backend, mask_dtype):
    """By a mask of any dtype and by their ids: the others are 0, whatever they hold."""
    given = {**ROWS, "sequences": 2, "vocabulary": 1000, "dtype": "bfloat16", "mask": "holes"}
    ignored = {"features": ("ignored",), "ignore_index": -7}
    for mask in ({"mask_dtype": mask_dtype}, {"mask": "absent", "masked_values": "usual"}):
        assert_value(backend, Case("token_stats", **{**given, **mask}, **STATISTICS, **ignored))


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


@pytest.mark.parametrize("token_id", [5001, -1])
def test_an_id_outside_breaks_its_own_row(backend, token_id):
    _, logits, token_ids, mask = make_rows(5001, torch.float32, 0, 1, 9)
    loss = loss_of(logits, token_ids, mask)
    clean = one_pass(backend, logits, rows_of(token_ids, mask), *loss)
    token_ids[0, 4] = token_id
    logprobs, _, grad = one_pass(backend, logits, rows_of(token_ids, mask), *loss)
    assert logprobs[0, 4].isnan()
    assert grad[0, 4].isnan().any()
    assert torch.equal(grad[0, :4], clean[2][0, :4])


def test_a_mask_of_minus_0_counts_as_0(backend):
    _, logits, token_ids, mask = make_rows(1000, torch.bfloat16, 0, 2, 3)
    masks = (mask, torch.where(mask, 1.0, -0.0))
    found = [token_stats(backend, logits, rows_of(token_ids, one)) for one in masks]
    assert all(map(torch.equal, *found))


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
