"""The linear forms against float64 autograd through explicit logits, for every chunk size."""

import math

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection, native
from tests.ops.inputs import backend_for

B, T, H, V, R = 4, 25, 24, 311, 3
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
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale, softcap, temperature": {"logit_scale": 0.5, "logit_softcap": 5.0, "temperature": 0.7},
    "temperature per row": {"temperature": torch.linspace(0.5, 2, B * T).reshape(B, T)},
    "lora": {"lora": True, "bias": True},
}


def batch(dtype=torch.float32, head=()):
    """Arguments of the linear loss; parameters are leaves that require gradients."""
    parameters = {"hidden": torch.randn(B, T, H), "weight": torch.randn(V, H) / math.sqrt(H) * 3}
    options = dict(head)
    if options.pop("bias", False):
        parameters["bias"] = torch.randn(V)
    if options.pop("lora", False):
        parameters["lora_a"], parameters["lora_b"] = torch.randn(R, H), torch.randn(V, R) * 0.1
    parameters = {k: v.to(dtype).requires_grad_() for k, v in parameters.items()}
    token_ids = torch.randint(V, (B, T))
    tokens = {
        "token_ids": token_ids,
        "advantages": torch.tensor([1.2, 0.0, -0.8, 0.5]),
        "mask": torch.rand(B, T) > 0.3,
    }
    with torch.no_grad():
        logprobs = explicit(parameters, fastrl.token_logprobs, token_ids, **options)
    tokens["old_logprobs"] = logprobs.float() + 0.3 * torch.randn(B, T)
    tokens["ref_logprobs"] = logprobs.float() + 0.3 * torch.randn(B, T)
    return parameters, tokens, options


def explicit(parameters, function, *arguments, **options):
    """Apply a function of logits to explicit logits."""
    p = parameters
    logits = p["hidden"] @ p["weight"].t()
    if "bias" in p:
        logits = logits + p["bias"]
    if "lora_a" in p:
        logits = logits + 2.0 * (p["hidden"] @ p["lora_a"].t()) @ p["lora_b"].t()
    return function(logits, *arguments, **options)


def linear(parameters, function, *arguments, **options):
    """Apply a linear form."""
    p = parameters
    lora = (p["lora_a"], p["lora_b"], 2.0) if "lora_a" in p else None
    return function(p["hidden"], p["weight"], *arguments, bias=p.get("bias"), lora=lora, **options)


def in_float64(values):
    return {
        k: v.detach().double().requires_grad_(v.requires_grad) if v.is_floating_point() else v
        for k, v in values.items()
    }


def assert_near(actual, exact, dtype, what):
    """fp32: rounding of sums of H and N terms; 16 bits: one rounding of the result on top."""
    eps = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    budget = eps * exact.abs() + 2e-5 * exact.abs().amax() + 1e-9
    excess = ((actual.double() - exact).abs() / budget).amax()
    assert excess <= 1, f"{what}: error is {float(excess):.2f} times its budget"


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradients_agree_with_float64(backend, name, chunk):
    if (backend, chunk) == ("reference", 1):
        pytest.skip("a hundred rounds of autograd; chunks of 7 say as much")
    parameters, tokens, options = batch()
    objective = OBJECTIVES[name]
    result = linear(
        parameters,
        fastrl.linear_policy_loss,
        **tokens,
        **options,
        objective=objective,
        chunk_tokens=chunk,
        backend=backend_for(objective, backend),
    )
    (result.loss * 0.5).backward()
    truth = in_float64(parameters)
    exact = explicit(truth, fastrl.logits_policy_loss, **in_float64(tokens), objective=objective)
    (exact.loss * 0.5).backward()
    assert_near(result.loss.detach(), exact.loss.detach(), torch.float32, "loss")
    for key in parameters:
        assert_near(parameters[key].grad, truth[key].grad, torch.float32, key)
    for key, value in result.metrics.items():
        assert abs(value - exact.metrics[key]) <= 1e-5 * max(1, abs(exact.metrics[key])), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HEADS)
def test_heads_as_they_come(backend, name, dtype):
    parameters, tokens, options = batch(dtype, HEADS[name])
    objective = OBJECTIVES["grpo"]
    result = linear(
        parameters,
        fastrl.linear_policy_loss,
        **tokens,
        **options,
        objective=objective,
        chunk_tokens=16,
        backend=backend,
    )
    result.loss.backward()
    truth, heat = in_float64(parameters), {**options}
    exact = explicit(
        truth, fastrl.logits_policy_loss, **in_float64(tokens), **heat, objective=objective
    )
    exact.loss.backward()
    for key in parameters:
        assert parameters[key].grad.dtype == dtype
        assert_near(parameters[key].grad, truth[key].grad, dtype, key)


@pytest.mark.parametrize("name", HEADS)
def test_bfloat16_heads_where_there_are_no_matrix_tiles(compiled, monkeypatch, name):
    monkeypatch.setattr(native, "has_matrix_tiles", lambda: False)
    test_heads_as_they_come("cpu", name, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_statistics_agree_with_float64(backend, chunk, dtype):
    parameters, tokens, _ = batch(dtype)
    token_ids, mask = tokens["token_ids"], tokens["mask"]
    stats = linear(
        parameters,
        fastrl.linear_token_stats,
        token_ids,
        outputs=fastrl.TokenStats._fields,
        mask=mask,
        chunk_tokens=chunk,
        backend=backend,
    )
    truth = in_float64(parameters)
    exact = explicit(
        truth, fastrl.token_stats, token_ids, outputs=fastrl.TokenStats._fields, mask=mask
    )
    assert (stats.logprobs - exact.logprobs).abs().amax() <= 1e-5
    assert (stats.entropy - exact.entropy).abs().amax() <= 1e-5
    assert (stats.logsumexp - exact.logsumexp).abs().amax() <= 1e-5
    assert torch.equal(stats.is_top1, exact.is_top1)
    upstream = torch.randn(3, B, T) * (torch.rand(3, B, T) > 0.5)
    for some in (stats, exact):
        pairs = zip(upstream, some[:3], strict=True)
        sum((grad * stat).sum() for grad, stat in pairs).backward()
    for key in parameters:
        assert_near(parameters[key].grad, truth[key].grad, dtype, key)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("garbage", [math.nan, 1e30])
def test_masked_rows_are_inert(backend, compact, garbage):
    parameters, tokens, _ = batch()
    tokens["advantages"] = torch.randn(B, T)
    masked = ~tokens["mask"]
    outcomes = []
    for dirty in (False, True):
        given = {k: v.detach().clone() for k, v in parameters.items()}
        values = {k: v.clone() for k, v in tokens.items()}
        if dirty:
            given["hidden"][masked] = garbage
            for key in ("advantages", "old_logprobs", "ref_logprobs"):
                values[key][masked] = garbage
            values["token_ids"][masked] = 10**7
        given = {k: v.requires_grad_() for k, v in given.items()}
        result = linear(
            given,
            fastrl.linear_policy_loss,
            **values,
            objective=OBJECTIVES["grpo"],
            compact=compact,
            chunk_tokens=9,
            backend=backend,
        )
        result.loss.backward()
        outcomes.append((result.loss, *(v.grad for v in given.values()), *result.metrics.values()))
    for clean, dirty in zip(*outcomes, strict=True):
        assert torch.equal(clean, dirty)
    assert (given["hidden"].grad[masked] == 0).all()


def test_compact_and_not_agree(backend):
    parameters, tokens, _ = batch()
    grads = []
    for compact in (True, False):
        result = linear(
            parameters,
            fastrl.linear_policy_loss,
            **tokens,
            objective="grpo",
            compact=compact,
            backend=backend,
        )
        grads.append((result.loss, *torch.autograd.grad(result.loss, list(parameters.values()))))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", ["loss", "stats"])
@pytest.mark.parametrize("wanted", [(), ("hidden",), ("weight",), ("hidden", "weight")])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_gradients_on_demand(backend, form, wanted, mode):
    parameters, tokens, _ = batch()
    for key, value in parameters.items():
        value.requires_grad_(key in wanted)
    with mode():
        if form == "loss":
            total = linear(parameters, fastrl.linear_policy_loss, **tokens, backend=backend).loss
        else:
            total = linear(
                parameters, fastrl.linear_token_logprobs, tokens["token_ids"], backend=backend
            ).sum()
    assert total.requires_grad == (bool(wanted) and mode is torch.enable_grad)
    if total.requires_grad:
        total.backward()
        assert {k for k, v in parameters.items() if v.grad is not None} == set(wanted)


def test_tied_weights_get_the_sum_of_both_uses(backend):
    weight = torch.randn(V, H, requires_grad=True)
    token_ids = torch.randint(V, (6,))

    def hidden():
        return torch.tanh(weight[torch.arange(6)])

    fastrl.linear_token_logprobs(hidden(), weight, token_ids, backend=backend).sum().backward()
    tied = weight.grad.clone()
    weight.grad = None
    torch.log_softmax(hidden() @ weight.t(), -1)[torch.arange(6), token_ids].sum().backward()
    torch.testing.assert_close(tied, weight.grad, rtol=1e-4, atol=1e-5)


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


def test_micro_batches_with_one_normalizer_add_up(backend):
    parameters, tokens, _ = batch()
    grads = []
    for size in (B, 2, 1):
        total = 0.0
        for i in range(0, B, size):
            part = slice(i, i + size)
            given = {**parameters, "hidden": parameters["hidden"][part]}
            some = {k: v[part] for k, v in tokens.items()}
            total = (
                total
                + linear(
                    given,
                    fastrl.linear_policy_loss,
                    **some,
                    objective=OBJECTIVES["grpo"],
                    normalizer=float(B),
                    backend=backend,
                ).loss
            )
        grads.append(torch.autograd.grad(total, list(parameters.values())))
    for some in grads[1:]:
        for one, other in zip(grads[0], some, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_two_runs_are_bit_equal(backend):
    parameters, tokens, _ = batch(torch.bfloat16)
    grads = []
    for _ in range(2):
        loss = linear(parameters, fastrl.linear_policy_loss, **tokens, backend=backend).loss
        grads.append((loss, *torch.autograd.grad(loss, list(parameters.values()))))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_without_metrics_the_loss_and_gradients_are_the_same(backend):
    parameters, tokens, _ = batch()
    outcomes = []
    for metrics in (True, False):
        result = linear(
            parameters,
            fastrl.linear_policy_loss,
            **{k: v for k, v in tokens.items() if k != "ref_logprobs"},
            metrics=metrics,
            backend=backend,
        )
        grads = torch.autograd.grad(result.loss, list(parameters.values()))
        outcomes.append((result.loss, *grads))
    assert result.metrics == {}
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("on_policy", [False, True])
def test_rollout_correction(backend, level, on_policy):
    parameters, tokens, _ = batch()
    tokens["rollout_logprobs"] = tokens["old_logprobs"] + 0.1 * torch.randn(B, T)
    if on_policy:
        del tokens["old_logprobs"]
    objective = Objective(kl_coef=0.1, rollout_correction=RolloutCorrection(level=level))
    result = linear(
        parameters, fastrl.linear_policy_loss, **tokens, objective=objective, backend=backend
    )
    truth = in_float64(parameters)
    exact = explicit(truth, fastrl.logits_policy_loss, **in_float64(tokens), objective=objective)
    result.loss.backward()
    exact.loss.backward()
    for key in parameters:
        assert_near(parameters[key].grad, truth[key].grad, torch.float32, key)


def test_the_weight_gradient_of_1024_chunks_is_as_good_as_one_gemm(backend):
    if backend == "reference":
        pytest.skip("a thousand chunks of autograd say nothing new")
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


class TestBadHeads:
    hidden, weight, ids = torch.zeros(2, 4), torch.zeros(7, 4), torch.tensor([0, 1])

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (
                {"weight": torch.zeros(7, 5)},
                ValueError,
                r"weight must have shape \[V, 4\].*\(7, 5\)",
            ),
            ({"hidden": torch.zeros(2, 7)}, ValueError, r"weight must have shape \[V, 7\]"),
            ({"hidden": torch.zeros(2, 0)}, ValueError, r"hidden must have shape .*got \(2, 0\)"),
            ({"weight": "head"}, TypeError, "weight must be a tensor, got str"),
            ({"bias": torch.zeros(6)}, ValueError, r"bias must have shape \(7,\), got \(6,\)"),
            ({"lora": (torch.zeros(2, 4),)}, TypeError, "lora must be"),
            ({"lora": (torch.zeros(2, 4), torch.zeros(7, 3), 1.0)}, ValueError, "lora must be"),
            ({"chunk_tokens": 0}, ValueError, "chunk_tokens must be at least 1, got 0"),
            ({"chunk_tokens": 1.5}, TypeError, "chunk_tokens must be an int, got float"),
            ({"compact": 1}, TypeError, "compact must be True or False, got int"),
            ({"token_ids": torch.tensor([0, 7])}, ValueError, r"token_ids must lie in \[0, 7\)"),
            ({"weight": torch.zeros(0)}, ValueError, "weight is empty: ZeRO-3"),
        ],
    )
    def test_is_refused_by_name(self, change, error, message):
        arguments = {"hidden": self.hidden, "weight": self.weight, "token_ids": self.ids, **change}
        with pytest.raises(error, match=message):
            fastrl.linear_token_logprobs(**arguments)
