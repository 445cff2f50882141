"""Statistics of tokens from logits: against float64, at the edges, in every layout."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastrl

pytestmark = pytest.mark.kernels

VOCABULARIES = (1, 2, 129, 32001, 50257, 151936)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = ("logprobs", "entropy", "logsumexp", "sum_sq_probs", "is_top1")


def random_logits(*shape, dtype=torch.float32, std=3.0):
    return (torch.randn(*shape) * std).to(dtype)


def truth(logits, token_ids, temperature=1.0, logit_scale=1.0, logit_softcap=None):
    """The statistics in float64, from the definition."""
    z = logits.detach().double() * logit_scale
    if logit_softcap is not None:
        z = logit_softcap * torch.tanh(z / logit_softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()[..., None]
    z = (z / temperature).requires_grad_()
    logprobs = torch.log_softmax(z, -1)
    probs = logprobs.exp()
    entropy = -torch.where(probs > 0, probs * logprobs, 0.0).sum(-1)
    chosen = logprobs.gather(-1, token_ids[..., None])[..., 0]
    return chosen, entropy, torch.logsumexp(z, -1), probs.square().sum(-1), z


def true_gradient(logits, token_ids, grad_logprobs, grad_entropy, grad_logsumexp, **options):
    """dL/dlogits in float64 by autograd."""
    x = logits.detach().double().requires_grad_()
    scale, softcap = options.get("logit_scale", 1.0), options.get("logit_softcap")
    z = x * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    temperature = options.get("temperature", 1.0)
    z = z / (temperature.double()[..., None] if torch.is_tensor(temperature) else temperature)
    logprobs = torch.log_softmax(z, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(-1, token_ids[..., None])[..., 0]
    total = (chosen * grad_logprobs.double()).sum() + (entropy * grad_entropy.double()).sum()
    total = total + (torch.logsumexp(z, -1) * grad_logsumexp.double()).sum()
    return torch.autograd.grad(total, x)[0]


def assert_gradient(actual, exact, coefficient_size):
    """Within one rounding of its dtype, plus 16 float32 roundings of the largest coefficient."""
    eps = torch.finfo(actual.dtype).eps
    tiny = torch.finfo(actual.dtype).smallest_normal * eps
    budget = eps * exact.abs() + 16 * 2**-24 * coefficient_size + tiny
    excess = ((actual.double() - exact).abs() / budget).max() if exact.numel() else torch.zeros(())
    assert excess <= 1, f"gradient error is {float(excess):.2f} times its budget"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_statistics_and_gradient_agree_with_float64(backend, vocabulary, dtype):
    rows = 3
    logits = random_logits(rows, vocabulary, dtype=dtype).requires_grad_()
    token_ids = torch.randint(vocabulary, (rows,))
    token_ids[-1] = vocabulary - 1  # in the last block
    stats = fastrl.token_stats(logits, token_ids, outputs=ALL, backend=backend)
    logprobs, entropy, logsumexp, sum_sq_probs, z = truth(logits, token_ids)
    assert ((stats.logprobs - logprobs).abs() <= 5e-6 * logprobs.abs().clamp(min=1)).all()
    assert ((stats.entropy - entropy).abs() <= 5e-5).all()
    assert ((stats.logsumexp - logsumexp).abs() <= 5e-6 * logsumexp.abs().clamp(min=1)).all()
    assert ((stats.sum_sq_probs - sum_sq_probs).abs() <= 1e-5 * sum_sq_probs).all()
    assert torch.equal(stats.is_top1, z.gather(-1, token_ids[:, None])[:, 0] >= z.amax(-1))
    grads = [torch.randn(rows) for _ in range(3)]
    (
        stats.logprobs * grads[0] + stats.entropy * grads[1] + stats.logsumexp * grads[2]
    ).sum().backward()
    size = sum(grad.abs() for grad in grads)[:, None] * (1 + math.log(vocabulary))
    assert_gradient(logits.grad, true_gradient(logits, token_ids, *grads), size)


@pytest.mark.parametrize("which", ["logprobs", "entropy", "logsumexp"])
def test_each_output_has_its_own_gradient(backend, which):
    logits = random_logits(5, 77).requires_grad_()
    token_ids = torch.randint(77, (5,))
    upstream = torch.randn(5)
    stats = fastrl.token_stats(logits, token_ids, outputs=(which,), backend=backend)
    getattr(stats, which).backward(upstream)
    grads = [upstream if which == name else torch.zeros(5) for name in ALL[:3]]
    size = upstream.abs()[:, None] * 6
    assert_gradient(logits.grad, true_gradient(logits, token_ids, *grads), size)


def test_outputs_not_asked_for_are_none(backend):
    stats = fastrl.token_stats(
        torch.zeros(2, 3), torch.tensor([0, 1]), outputs=("is_top1",), backend=backend
    )
    assert [field is None for field in stats] == [True, True, True, True, False]


@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.parametrize("vocabulary", [129, 50257])
def test_a_common_offset_changes_nothing(backend, vocabulary, offset):
    # multiples of 2**-8 stay exact in float32 beside 1e4
    logits = (random_logits(4, vocabulary) * 256).round() / 256
    token_ids = torch.randint(vocabulary, (4,))
    outcomes = []
    for shift in (0.0, offset):
        x = (logits + shift).requires_grad_()
        stats = fastrl.token_stats(x, token_ids, backend=backend, temperature=0.7)
        (stats.logprobs - stats.entropy).sum().backward()
        outcomes.append((stats.logprobs.detach(), stats.entropy.detach(), x.grad))
    for plain, shifted in zip(*outcomes, strict=True):
        assert (plain - shifted).abs().max() <= 2e-5


@pytest.mark.parametrize(
    ("row", "entropy"),
    [
        ([0.0, -math.inf], 0.0),
        ([0.0, 0.0, -math.inf], 0.6931471824645996),
        ([65504.0, -65504.0], 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("softcap", [None, 1e5, 30.0])
def test_excluded_and_extreme_logits(backend, row, entropy, dtype, softcap):
    logits = torch.tensor([row], dtype=dtype, requires_grad=True)
    stats = fastrl.token_stats(
        logits, torch.tensor([0]), outputs=ALL, logit_softcap=softcap, backend=backend
    )
    if softcap != 30.0 or math.inf in row or -math.inf in row:  # 30 leaves -65504 a chance
        assert abs(stats.entropy.item() - entropy) <= 1e-6
    (stats.logprobs + stats.entropy + stats.logsumexp).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[torch.isinf(logits)] == 0).all()


def test_an_excluded_token_has_logprob_minus_infinity_and_no_gradient_at_its_column(backend):
    logits = torch.tensor([[1.0, -math.inf, 2.0]], requires_grad=True)
    logprob = fastrl.token_logprobs(logits, torch.tensor([1]), backend=backend)
    assert logprob.item() == -math.inf
    logprob.sum().backward()
    assert logits.grad[0, 1] == 0
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_broken_row_is_nan_alone(backend, bad):
    logits = random_logits(3, 130)
    logits[1] = -math.inf if bad is None else logits[1]
    if bad is not None:
        logits[1, 100] = bad
    logprobs = fastrl.token_logprobs(logits, torch.tensor([0, 1, 2]), backend=backend)
    assert torch.isnan(logprobs).tolist() == [False, True, False]


@pytest.mark.parametrize("vocabulary", [50257, 129920])
def test_very_negative_peaked_logits(backend, vocabulary):
    logits = torch.full((2, vocabulary), -60.0)
    logits[0, 5] = -30.0
    logits[1, vocabulary - 1] = -30.0
    token_ids = torch.tensor([5, 7])
    logprobs = fastrl.token_logprobs(logits, token_ids, backend=backend)
    exact = truth(logits, token_ids)[0]
    assert ((logprobs - exact).abs() <= 5e-6 * exact.abs().clamp(min=1)).all()
    assert (logprobs <= 0).all()


@pytest.mark.parametrize("garbage", [math.nan, 1e30, -math.inf])
def test_what_a_masked_row_holds_is_inert(backend, garbage):
    clean = random_logits(2, 4, 200)
    token_ids = torch.randint(200, (2, 4))
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]])
    temperature = torch.rand(2, 4) + 0.5
    outcomes = []
    for dirty in (False, True):
        logits, ids, heat = clean.clone(), token_ids.clone(), temperature.clone()
        if dirty:
            logits[mask == 0], heat[mask == 0], ids[mask == 0] = garbage, math.nan, 10**9
        logits.requires_grad_()
        stats = fastrl.token_stats(
            logits, ids, outputs=ALL, mask=mask, temperature=heat, backend=backend
        )
        (stats.logprobs + stats.entropy).sum().backward()
        outcomes.append((*stats, logits.grad))
    for before, after in zip(*outcomes, strict=True):
        assert torch.equal(before, after)
        assert (after[mask == 0] == 0).all()


def test_ignore_index_gives_zero_and_no_gradient(backend):
    logits = random_logits(3, 40).requires_grad_()
    logprobs = fastrl.token_logprobs(logits, torch.tensor([3, -100, 5]), backend=backend)
    logprobs.sum().backward()
    assert logprobs[1] == 0
    assert (logits.grad[1] == 0).all()
    assert (logits.grad[0] != 0).any()


@pytest.mark.parametrize("bad", [-1, 7, 2**40])
def test_an_id_outside_the_vocabulary_raises(backend, bad):
    if backend == "triton":
        pytest.skip("kernels for a GPU do not check ids")
    with pytest.raises(ValueError, match=r"token_ids must lie in \[0, 7\).*got .* at \(0, 1\)"):
        fastrl.token_logprobs(torch.zeros(1, 2, 7), torch.tensor([[0, bad]]), backend=backend)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0,)])
def test_no_rows(backend, shape):
    logits = torch.zeros(*shape, 9, requires_grad=True)
    stats = fastrl.token_stats(logits, torch.zeros(shape, dtype=torch.long), backend=backend)
    (stats.logprobs.sum() + stats.entropy.sum()).backward()
    assert stats.logprobs.shape == shape
    assert logits.grad.shape == logits.shape


@pytest.mark.parametrize("vocabulary", [501, 9001])  # one block of the CPU, and several
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("per_row", [False, True])
def test_scale_softcap_temperature_in_this_order(backend, per_row, softcap, dtype, vocabulary):
    logits = random_logits(2, 3, vocabulary, dtype=dtype, std=20).requires_grad_()
    token_ids = torch.randint(vocabulary, (2, 3))
    temperature = torch.tensor([[0.6, 1.0, 1.3], [2.0, 0.7, 1.1]]) if per_row else 0.6
    options = {"temperature": temperature, "logit_scale": 0.25, "logit_softcap": softcap}
    stats = fastrl.token_stats(logits, token_ids, backend=backend, **options)
    logprobs, entropy, *_ = truth(logits, token_ids, **options)
    assert ((stats.logprobs - logprobs).abs() <= 5e-6 * logprobs.abs().clamp(min=1)).all()
    assert ((stats.entropy - entropy).abs() <= 5e-5).all()
    grads = torch.randn(2, 3), torch.randn(2, 3), torch.zeros(2, 3)
    (stats.logprobs * grads[0] + stats.entropy * grads[1]).sum().backward()
    size = (grads[0].abs() + grads[1].abs())[..., None] * 8
    assert_gradient(logits.grad, true_gradient(logits, token_ids, *grads, **options), size)


@pytest.mark.parametrize("shape", [(), (2,), (2, 1), (2, 3)])
def test_shapes_of_temperature(backend, shape):
    logits, token_ids = random_logits(2, 3, 17), torch.randint(17, (2, 3))
    temperature = torch.rand(shape) + 0.5
    full = temperature[:, None] if temperature.dim() == 1 else temperature
    expected = truth(logits, token_ids, full.expand(2, 3))[0]
    actual = fastrl.token_logprobs(logits, token_ids, temperature=temperature, backend=backend)
    torch.testing.assert_close(actual.double(), expected, rtol=5e-6, atol=5e-6)


LAYOUTS = {
    "sliced in time": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "sliced in the vocabulary": lambda x: torch.cat([x, torch.full_like(x, 99)], -1)[
        ..., : x.shape[-1]
    ],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "offset by one": lambda x: (
        torch.cat([x, x], -1)
        .view(-1)[1:][: x.numel() * 2]
        .as_strided(x.shape, (x.shape[1] * x.shape[2] * 2, x.shape[2] * 2, 1))
    ),
    "strided vocabulary": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_give_the_same_as_contiguous(backend, layout, dtype):
    viewed = LAYOUTS[layout](random_logits(3, 4, 333, dtype=dtype)).detach().requires_grad_()
    assert not viewed.is_contiguous() or viewed.data_ptr() % 64
    plain = viewed.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    token_ids = torch.randint(333, (3, 4))
    outcomes = []
    for logits in (viewed, plain):
        stats = fastrl.token_stats(logits, token_ids, backend=backend)
        (stats.logprobs + 0.1 * stats.entropy).sum().backward()
        outcomes.append((stats.logprobs, stats.entropy, logits.grad))
    for actual, expected in zip(*outcomes, strict=True):
        assert torch.equal(actual, expected)


def test_expanded_logits(backend):
    row = random_logits(1, 1, 60)
    token_ids = torch.randint(60, (3, 5))
    actual = fastrl.token_logprobs(row.expand(3, 5, 60), token_ids, backend=backend)
    assert torch.equal(actual, row.log_softmax(-1)[0, 0][token_ids]) or torch.allclose(
        actual, row.log_softmax(-1)[0, 0][token_ids], atol=2e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [257, 50257])
def test_a_row_does_not_depend_on_other_rows(backend, vocabulary, dtype):
    if backend == "reference":
        pytest.skip("eager torch promises no batch invariance")
    logits = random_logits(9, vocabulary, dtype=dtype)
    token_ids = torch.randint(vocabulary, (9,))
    alone, grads = [], []
    for i in range(9):
        row = logits[i : i + 1].clone().requires_grad_()
        stats = fastrl.token_stats(row, token_ids[i : i + 1], backend=backend)
        (stats.logprobs + stats.entropy).sum().backward()
        alone.append(torch.cat([stats.logprobs, stats.entropy]))
        grads.append(row.grad)
    together = logits.clone().requires_grad_()
    stats = fastrl.token_stats(together, token_ids, backend=backend)
    (stats.logprobs + stats.entropy).sum().backward()
    assert torch.equal(torch.stack([stats.logprobs, stats.entropy], 1), torch.stack(alone))
    assert torch.equal(together.grad, torch.cat(grads))


@pytest.mark.parametrize("upstream", ["sum", "expanded", "strided", "zero"])
def test_upstream_gradients_of_any_layout(backend, upstream):
    logits = random_logits(2, 6, 50).requires_grad_()
    token_ids = torch.randint(50, (2, 6))
    logprobs = fastrl.token_logprobs(logits, token_ids, backend=backend)
    grad = {
        "sum": torch.ones(2, 6),
        "expanded": torch.tensor(0.5).expand(2, 6),
        "strided": torch.randn(4, 12)[::2, ::2],
        "zero": torch.zeros(2, 6),
    }[upstream]
    if upstream == "sum":
        logprobs.sum().backward()
    else:
        logprobs.backward(grad)
    zero = torch.zeros(2, 6)
    exact = true_gradient(logits, token_ids, grad, zero, zero)
    assert_gradient(logits.grad, exact, grad.abs()[..., None] * 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(backend, mode):
    logits, token_ids = random_logits(3, 20).requires_grad_(), torch.tensor([1, 2, 3])
    with mode():
        stats = fastrl.token_stats(logits, token_ids, backend=backend)
    assert not stats.logprobs.requires_grad
    torch.testing.assert_close(stats.logprobs.double(), truth(logits, token_ids)[0].detach())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_activation_checkpointing(backend, use_reentrant):
    weight = torch.randn(8, 30, requires_grad=True)
    hidden, token_ids = torch.randn(5, 8, requires_grad=True), torch.randint(30, (5,))

    def score(x):
        return fastrl.token_logprobs(x @ weight, token_ids, backend=backend)

    plain = torch.autograd.grad(score(hidden).sum(), (hidden, weight))
    recomputed = checkpoint(score, hidden, use_reentrant=use_reentrant)
    recomputed.sum().backward()
    assert torch.equal(hidden.grad, plain[0])
    assert torch.equal(weight.grad, plain[1])


def test_retained_graph_gives_the_same_gradient_twice(backend):
    logits = random_logits(3, 20).requires_grad_()
    total = fastrl.token_logprobs(logits, torch.tensor([1, 2, 3]), backend=backend).sum()
    first = torch.autograd.grad(total, logits, retain_graph=True)[0].clone()
    assert torch.equal(first, torch.autograd.grad(total, logits)[0])


def test_the_second_derivative_is_refused_by_kernels(backend):
    if backend == "reference":
        pytest.skip("eager torch has second derivatives")
    logits = random_logits(3, 20).requires_grad_()
    total = fastrl.token_logprobs(logits, torch.tensor([1, 2, 3]), backend=backend).sum()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(total, logits, create_graph=True)


def test_gradcheck_of_the_reference():
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    token_ids = torch.randint(7, (2, 3))
    temperature = torch.rand(2, 3, dtype=torch.float64) + 0.5

    def three(x):
        return fastrl.token_stats(
            x,
            token_ids,
            outputs=ALL[:3],
            temperature=temperature,
            logit_scale=0.5,
            logit_softcap=2.0,
            backend="reference",
        )[:3]

    assert torch.autograd.gradcheck(three, (logits,))


@pytest.mark.parametrize("softcap", [None, 10.0])
def test_an_excluded_token_is_the_most_likely_only_among_excluded_ones(backend, softcap):
    logits = torch.full((3, 5), -math.inf)
    logits[1, 3], logits[2, 3] = 0.0, -1e4  # where a softcap has reached its end
    stats = fastrl.token_stats(
        logits, torch.tensor([2, 2, 2]), outputs=("is_top1",), logit_softcap=softcap,
        backend=backend,
    )  # fmt: skip
    assert stats.is_top1.tolist() == [True, False, False]
