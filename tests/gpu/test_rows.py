"""The kernels on rows of logits, of every shape that a row is split into, against float64."""

from math import inf, nan

import pytest
import torch

from fastrl import reference
from fastrl.contract import LossArguments
from fastrl.library import operators
from tests.gpu.rows import (
    DTYPES,
    OBJECTIVES,
    OPTIONS,
    assert_gradient,
    exact,
    gradient,
    loss_gradient,
    loss_of,
    make_rows,
    objective_of,
    one_pass,
    rows_of,
    saved,
    shared_out,
    token_stats,
)
from tests.ops.closeness import assert_within_budget

pytestmark = pytest.mark.kernels_alone  # their kernels have other shapes

# (vocabulary, elements beside each row): of one part and of many, aligned and not
_SHAPES = ((1, 0), (37, 2), (1000, 0), (1003, 1), (5001, 2))
#: (V, beside, dtype, options): every dtype and option with every shape, if not with each other;
#: then a whole block of Triton's and a tail, and more parts than a cluster of CUDA has blocks
CASES = [
    (*shape, dtype, OPTIONS[(i + j) % 3])
    for i, shape in enumerate(_SHAPES)
    for j, dtype in enumerate(DTYPES)
] + [(20_000, 0, torch.bfloat16, {}), (33_000, 0, torch.float32, OPTIONS[1])]


@pytest.mark.parametrize(("V", "beside", "dtype", "options"), CASES)
def test_token_stats_and_their_gradient(backend, monkeypatch, V, beside, dtype, options):
    whole, logits, token_ids, mask = make_rows(V, dtype, beside)
    rows = rows_of(token_ids, mask, **options)
    stats = token_stats(backend, logits, rows)
    expected = exact(logits, token_ids, mask, **options)
    size = 1 + expected.logsumexp.abs() + expected.logprobs.abs()
    for name in ("logprobs", "entropy", "logsumexp", "sum_sq_probs"):
        assert_within_budget(getattr(stats, name), getattr(expected, name), size=size, ulps=12)
    assert torch.equal(stats.is_top1, expected.is_top1)

    grads = [torch.randn(1, 4) for _ in range(3)]
    for grad in grads:
        grad[0, 1] = 0
    wanted = gradient(logits, token_ids, mask, grads, **options)
    backward = (*rows, *saved(stats), *grads)
    grad = operators(backend).token_stats_bwd(logits, *backward)
    assert_gradient(grad, *wanted)
    assert not grad[0, 1].any()
    assert not grad[~mask].any()
    before = whole.clone()
    with shared_out(backend, monkeypatch):
        for one, other in zip(token_stats(backend, logits, rows), stats, strict=True):
            assert torch.equal(one, other)
        operators(backend).token_stats_bwd_(logits, *backward, False)
    assert torch.equal(logits, grad)
    logits.copy_(before[:, :4, :V])
    assert torch.equal(whole.nan_to_num(7), before.nan_to_num(7))  # nothing beside the rows


@pytest.mark.parametrize(("V", "beside", "dtype", "options"), CASES)
def test_the_loss_in_one_pass(backend, monkeypatch, V, beside, dtype, options):
    whole, logits, token_ids, mask = make_rows(V, dtype, beside)
    loss = loss_of("everything", logits, token_ids, mask, **options)
    expected = loss_gradient(logits, token_ids, mask, *loss, **options)
    rows = rows_of(token_ids, mask, **options)
    stats = token_stats(backend, logits, rows)
    logprobs, entropy, grad = one_pass(backend, logits, rows, *loss)
    # a ratio to the log-probabilities of an earlier call is exactly 1
    assert torch.equal(logprobs, stats.logprobs)
    assert torch.equal(entropy, stats.entropy)
    assert_gradient(grad, *expected)
    assert not grad[~mask].any()
    before = whole.clone()
    for inplace in (False, True):
        with shared_out(backend, monkeypatch):
            if inplace:
                operators(backend).logits_policy_loss_fwd_(logits, *rows, *loss[0], *loss[1], False)
            other = logits if inplace else one_pass(backend, logits, rows, *loss)[-1]
        assert torch.equal(other, grad)
    logits.copy_(before[:, :4, :V])
    assert torch.equal(whole.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_in_one_pass(backend, monkeypatch, name, shared):
    _, logits, token_ids, mask = make_rows(1003, torch.float32, 2)
    loss = loss_of(name, logits, token_ids, mask)
    with shared_out(backend, monkeypatch, shared):
        *_, grad = one_pass(backend, logits, rows_of(token_ids, mask), *loss)
    assert_gradient(grad, *loss_gradient(logits, token_ids, mask, *loss))


@pytest.mark.parametrize("V", [4096, 5001])
def test_a_row_does_not_depend_on_the_others(backend, V):
    """With fewer rows, more blocks share a row."""
    _, logits, token_ids, mask = make_rows(V, torch.bfloat16, 0, 1, 170)  # 4 blocks each of 40 SMs
    mask[0, 20:40] = False
    loss, objective = loss_of("everything", logits, token_ids, mask)

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
    loss = loss_of("everything", logits, token_ids, mask)
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
    expected = exact(logits[:, 6:7], token_ids[:, 6:7], mask[:, 6:7])
    assert abs(logprobs[0, 6] - expected.logprobs) < 2e-6
    assert abs(entropy[0, 6] - expected.entropy) < 5e-6
    assert not grad[0, 6, V // 2 :].any()
    assert grad[0, 6].isfinite().all()
    assert logprobs[0, 7] == -inf


@pytest.mark.parametrize("V", [300, 5001])
def test_a_common_offset_costs_nothing(backend, V):
    _, logits, token_ids, mask = make_rows(V, torch.float32)
    logits = (logits * 256).round() / 256  # so that adding 8192 is exact
    loss, rows = loss_of("everything", logits, token_ids, mask), rows_of(token_ids, mask)
    plain = one_pass(backend, logits, rows, *loss)
    moved = one_pass(backend, logits + 8192, rows, *loss)
    for one, other, most in zip(moved, plain, (2e-6, 5e-6, 1e-5), strict=True):
        assert (one - other)[mask].abs().max() < most


@pytest.mark.parametrize("V", [40, 4096, 5001])
def test_rows_without_a_gradient_are_zeros(backend, V):
    _, logits, token_ids, mask = make_rows(V, torch.bfloat16, 0, 1, 8)
    loss, _ = loss_of("everything", logits, token_ids, mask)
    loss.advantages[0, 1] = loss.weights[0, 2] = loss.policy_weights[0, 3] = 0
    *_, grad = one_pass(backend, logits, rows_of(token_ids, mask), loss, objective_of())
    assert not grad[0, 1:4].any()
    assert not grad[~mask].any()
    assert grad[0, 0].any()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bounds", [None, (0, 0, 2, 3, 3, 11, 12, 12)], ids=["padded", "packed"])
def test_constants_per_sequence_are_those_of_its_tokens(backend, monkeypatch, bounds, shared):
    B, T, count, cu_seqlens = 4, 3, 4, None
    if bounds is not None:
        B, T, count, cu_seqlens = 1, 12, 7, torch.tensor(bounds, dtype=torch.int32)
    _, logits, token_ids, mask = make_rows(1000, torch.float32, 0, B, T)
    rows, (per_token, objective) = (
        rows_of(token_ids, mask),
        loss_of("everything", logits, token_ids, mask),
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
