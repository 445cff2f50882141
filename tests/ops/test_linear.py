"""The linear forms against float64 autograd through explicit logits, for every chunk size."""

import math

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection, native
from tests.ops.inputs import backend_for
from tests.ops.linear.linear_head import (
    HEADS,
    B,
    H,
    T,
    V,
    batch,
    explicit,
    in_float64,
    linear,
    near,
)

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.not_on("triton"),  # too long; the rows from hidden states are those from logits
]
CHUNKS = (1, 7, 64, None)
OBJECTIVES = {
    "grpo": Objective.preset("grpo", kl_coef=0.1),
    "dapo without kl": Objective.preset("dapo"),
    "entropy": Objective(entropy_coef=0.05),
    "less entropy": Objective(entropy_coef=-0.5),
    "cispo": Objective.preset("cispo", clip_high=0.1),
    "sapo": Objective.preset("sapo", kl_coef=0.1, kl_estimator="k1"),
    "gspo": Objective.preset("gspo", clip_low=0.2, clip_high=0.2, entropy_coef=0.02),
    "gmpo": Objective.preset("gmpo"),
    "a function": Objective(surrogate=lambda new, old, ref, a: -(new - old).exp() * a, kl_coef=0.1),
    "a function of no advantage": Objective(surrogate=lambda new, old, ref, a: (new - old).exp()),
}
#: Weights that are views: column-major, with gaps, with overlapping rows or columns.
WEIGHTS = {
    "transposed": lambda dtype: torch.randn(H, V).to(dtype).t(),
    "part of a wider one": lambda dtype: torch.randn(V, H + 3).to(dtype)[:, 2 : 2 + H],
    "every second": lambda dtype: torch.randn(2 * V, 2 * H).to(dtype)[::2, ::2],
    "one row": lambda dtype: torch.randn(1, 2 * H).to(dtype)[:, ::2],
    "rows alike": lambda dtype: torch.randn(1, H).to(dtype).expand(V, H),
    "all alike": lambda dtype: torch.randn(1, 1).to(dtype).expand(V, H),
}


def loss_of(parameters, tokens, backend, objective=OBJECTIVES["grpo"], **options):
    return linear(
        parameters, fastrl.linear_policy_loss, **tokens, **options, objective=objective,
        backend=backend_for(objective, backend),
    )  # fmt: skip


def with_gradients(parameters, tokens, backend, **options):
    loss = loss_of(parameters, tokens, backend, **options).loss
    wanted = [x for x in parameters.values() if x.requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, wanted)


def assert_agrees(parameters, tokens, backend, objective=OBJECTIVES["grpo"], *, options=(), **how):
    """Compare loss, metrics and gradients with float64; 16-bit gradients are rounded once."""
    options, compared = dict(options), how.pop("compared", parameters)
    result = loss_of(parameters, tokens, backend, objective, **options, **how)
    (result.loss * 0.5).backward()
    truth, given = in_float64(parameters), in_float64(tokens)
    exact = explicit(truth, fastrl.logits_policy_loss, **given, **options, objective=objective)
    (exact.loss * 0.5).backward()
    near(result.loss.detach(), exact.loss.detach(), torch.float32, "loss")
    for key in compared:
        x = parameters[key]
        assert x.grad.dtype == x.dtype
        near(x.grad, truth[key].grad, x.dtype, key)
    for key, value in result.metrics.items():
        assert abs(value - exact.metrics[key]) <= 1e-5 * max(1, abs(exact.metrics[key])), key


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradients_agree_with_float64(backend, name, chunk):
    if (backend, chunk) == ("reference", 1):
        pytest.skip("a hundred rounds of autograd; chunks of 7 say as much")
    parameters, tokens, _ = batch()
    assert_agrees(parameters, tokens, backend, OBJECTIVES[name], chunk_tokens=chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HEADS)
def test_heads_as_they_come(backend, name, dtype):
    parameters, tokens, options = batch(dtype, HEADS[name])
    assert_agrees(parameters, tokens, backend, options=options, chunk_tokens=16)


@pytest.mark.parametrize("name", HEADS)
def test_bfloat16_heads_where_there_are_no_matrix_tiles(compiled, monkeypatch, name):
    monkeypatch.setattr(native, "has_matrix_tiles", lambda: False)
    test_heads_as_they_come("cpu", name, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_in_any_memory(backend, name, dtype):
    parameters, tokens, _ = batch(dtype)
    parameters["weight"] = WEIGHTS[name](dtype).requires_grad_()
    tokens["token_ids"] %= parameters["weight"].shape[0]
    # where rows are alike, the gradient of the hidden states cancels
    assert_agrees(parameters, tokens, backend, compared=("weight",))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("on_policy", [False, True])
def test_rollout_correction(backend, level, on_policy):
    parameters, tokens, _ = batch()
    tokens["rollout_logprobs"] = tokens["old_logprobs"] + 0.1 * torch.randn(B, T)
    if on_policy:
        del tokens["old_logprobs"]
    objective = Objective(kl_coef=0.1, rollout_correction=RolloutCorrection(level=level))
    assert_agrees(parameters, tokens, backend, objective)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_statistics_agree_with_float64(backend, chunk, dtype):
    parameters, tokens, _ = batch(dtype)
    truth, ids = in_float64(parameters), tokens["token_ids"]
    given = {"outputs": fastrl.TokenStats._fields, "mask": tokens["mask"]}
    exact = explicit(truth, fastrl.token_stats, ids, **given)
    given |= {"chunk_tokens": chunk, "backend": backend}
    stats = linear(parameters, fastrl.linear_token_stats, ids, **given)
    for name in ("logprobs", "entropy", "logsumexp"):
        assert (getattr(stats, name) - getattr(exact, name)).abs().amax() <= 1e-5, name
    assert torch.equal(stats.is_top1, exact.is_top1)
    upstream = torch.randn(3, B, T) * (torch.rand(3, B, T) > 0.5)
    for some in (stats, exact):
        pairs = zip(upstream, some[:3], strict=True)
        sum((grad * stat).sum() for grad, stat in pairs).backward()
    for key in parameters:
        near(parameters[key].grad, truth[key].grad, dtype, key)


def test_compact_and_not_agree(backend):
    """Also where masked hidden states hold NaN."""
    parameters, tokens, _ = batch()
    parameters["hidden"].data[~tokens["mask"]] = math.nan
    some, whole = (
        with_gradients(parameters, tokens, backend, compact=compact, chunk_tokens=9)
        for compact in (True, False)
    )
    for one, other in zip(some, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("frozen", [False, True])
def test_without_metrics_the_loss_and_gradients_are_the_same(backend, frozen):
    parameters, tokens, _ = batch()
    parameters["hidden"].requires_grad_(not frozen)
    given = {"objective": Objective()}
    assert loss_of(parameters, tokens, backend, metrics=False, **given).metrics == {}
    with_metrics, without = (
        with_gradients(parameters, tokens, backend, metrics=metrics, **given)
        for metrics in (True, False)
    )
    for one, other in zip(with_metrics, without, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_head_in_another_dtype_is_not_rounded(backend, dtypes, autocast):
    hidden = torch.randn(9, H).to(dtypes[0]).requires_grad_()
    weight = torch.randn(V, H).to(dtypes[1]).requires_grad_()
    token_ids = torch.randint(V, (9,))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logprobs = fastrl.linear_token_logprobs(hidden, weight, token_ids, backend=backend)
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1)[torch.arange(9), token_ids]
    assert (logprobs - exact).abs().amax() <= 1e-4
    logprobs.sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == dtypes


@pytest.mark.not_on("reference")  # a thousand chunks of autograd say nothing new
def test_the_weight_gradient_of_1024_chunks_is_as_good_as_one_gemm(backend):
    rows = 1024
    hidden = torch.randn(rows, H).bfloat16()
    weight = (torch.randn(V, H) / math.sqrt(H)).bfloat16().requires_grad_()
    token_ids, upstream = torch.randint(V, (rows,)), torch.randn(rows)
    logprobs = fastrl.linear_token_logprobs(
        hidden, weight, token_ids, chunk_tokens=1, backend=backend
    )
    (grad,) = torch.autograd.grad((logprobs * upstream).sum(), weight)
    exact_weight = weight.detach().double().requires_grad_()
    z = hidden.double() @ exact_weight.t()
    chosen = z.log_softmax(-1)[torch.arange(rows), token_ids]
    (exact,) = torch.autograd.grad((chosen * upstream.double()).sum(), exact_weight)
    grad_logits = upstream[:, None] * (
        torch.nn.functional.one_hot(token_ids, V) - z.detach().softmax(-1)
    )
    one_gemm = grad_logits.bfloat16().t() @ hidden
    error, reference = ((g.double() - exact).norm() for g in (grad, one_gemm))
    assert error <= 1.5 * reference
