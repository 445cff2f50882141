"""Statistics of tokens from logits: against float64, at the edges, in every layout."""

import math

import pytest
import torch

import fastrl
from tests.fuzz.oracle.bounded import FLOAT64, Bounded
from tests.fuzz.oracle.rows import Head, Rows

pytestmark = pytest.mark.kernels

VOCABULARIES = (1, 2, 129, 32001, 50257, 151936)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = fastrl.TokenStats._fields
#: relative and absolute errors
ERRORS = {
    "logprobs": (5e-6, 5e-6),
    "entropy": (0.0, 5e-5),
    "logsumexp": (5e-6, 5e-6),
    "sum_sq_probs": (1e-5, 0.0),
}


def random_logits(*shape, dtype=torch.float32, std=3.0):
    return (torch.randn(*shape) * std).to(dtype)


def oracle(logits, token_ids, temperature=1.0, logit_scale=1.0, logit_softcap=None):
    """The rows in float64."""
    x = logits.detach().double().flatten(0, -2).numpy()
    heat = torch.as_tensor(temperature).double().expand(token_ids.shape).flatten()
    head = Head(heat.numpy(), logit_scale, logit_softcap)
    return Rows(x, token_ids.flatten().numpy(), head, FLOAT64)


def assert_statistics(stats, exact):
    for name, (rtol, atol) in ERRORS.items():
        found = getattr(stats, name)
        if found is not None:
            value = torch.from_numpy(getattr(exact, name).value).view(found.shape)
            torch.testing.assert_close(
                found.double(), value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )
    if stats.is_top1 is not None:
        assert torch.equal(stats.is_top1.flatten(), torch.from_numpy(exact.is_top1.yes))


def assert_gradient(actual, exact, upstream, coefficient_size):
    """Within one rounding of its dtype, plus 16 float32 roundings of the largest coefficient.

    ``upstream`` has the gradients of log-probabilities, entropy and logsumexp, or 0.0.
    """
    given = [
        Bounded(
            torch.zeros(exact.n).add(torch.as_tensor(g).flatten()).double().numpy(), 0.0, FLOAT64
        )
        for g in upstream
    ]
    exact = torch.from_numpy(exact.gradient(*given).value).view(actual.shape)
    eps = torch.finfo(actual.dtype).eps
    tiny = torch.finfo(actual.dtype).smallest_normal * eps
    budget = eps * exact.abs() + 16 * 2**-24 * coefficient_size + tiny
    excess = ((actual.double() - exact).abs() / budget).max()
    assert excess <= 1, f"gradient error is {float(excess):.2f} times its budget"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_statistics_and_gradient_agree_with_float64(backend, vocabulary, dtype):
    rows = 3
    logits = random_logits(rows, vocabulary, dtype=dtype).requires_grad_()
    token_ids = torch.randint(vocabulary, (rows,))
    token_ids[-1] = vocabulary - 1  # in the last block
    stats = fastrl.token_stats(logits, token_ids, outputs=ALL, backend=backend)
    exact = oracle(logits, token_ids)
    assert_statistics(stats, exact)
    grads = torch.randn(3, rows)
    sum((grad * stat).sum() for grad, stat in zip(grads, stats[:3], strict=True)).backward()
    size = grads.abs().sum(0)[:, None] * (1 + math.log(vocabulary))
    assert_gradient(logits.grad, exact, grads, size)


@pytest.mark.parametrize("which", ["logprobs", "entropy", "logsumexp"])
def test_each_output_has_its_own_gradient(backend, which):
    logits = random_logits(5, 77).requires_grad_()
    token_ids = torch.randint(77, (5,))
    upstream = torch.randn(5)
    stats = fastrl.token_stats(logits, token_ids, outputs=(which,), backend=backend)
    assert [name for name, x in zip(ALL, stats, strict=True) if x is not None] == [which]
    getattr(stats, which).backward(upstream)
    grads = [upstream if which == name else 0.0 for name in ALL[:3]]
    assert_gradient(logits.grad, oracle(logits, token_ids), grads, upstream.abs()[:, None] * 6)


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
    if softcap != 30.0 or -math.inf in row:  # 30 leaves -65504 a chance
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


@pytest.mark.parametrize("softcap", [None, 10.0])
def test_an_excluded_token_is_the_most_likely_only_among_excluded_ones(backend, softcap):
    logits = torch.full((3, 5), -math.inf)
    logits[1, 3], logits[2, 3] = 0.0, -1e4  # where a softcap has reached its end
    given = {"outputs": ("is_top1",), "logit_softcap": softcap, "backend": backend}
    stats = fastrl.token_stats(logits, torch.tensor([2, 2, 2]), **given)
    assert stats.is_top1.tolist() == [True, False, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_broken_row_is_nan_alone(backend, bad):
    logits = random_logits(3, 130)
    if bad is None:
        logits[1] = -math.inf
    else:
        logits[1, 100] = bad
    logprobs = fastrl.token_logprobs(logits, torch.tensor([0, 1, 2]), backend=backend)
    assert torch.isnan(logprobs).tolist() == [False, True, False]


@pytest.mark.parametrize("vocabulary", [50257, 129920])
def test_very_negative_peaked_logits(backend, vocabulary):
    logits = torch.full((2, vocabulary), -60.0)
    logits[0, 5] = -30.0
    logits[1, vocabulary - 1] = -30.0
    token_ids = torch.tensor([5, 7])
    stats = fastrl.token_stats(logits, token_ids, outputs=("logprobs",), backend=backend)
    assert_statistics(stats, oracle(logits, token_ids))
    assert (stats.logprobs <= 0).all()


def test_ignore_index_gives_zero_and_no_gradient(backend):
    logits = random_logits(3, 40).requires_grad_()
    logprobs = fastrl.token_logprobs(logits, torch.tensor([3, -100, 5]), backend=backend)
    logprobs.sum().backward()
    assert logprobs[1] == 0
    assert (logits.grad[1] == 0).all()
    assert (logits.grad[0] != 0).any()


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
    exact = oracle(logits, token_ids, **options)
    assert_statistics(stats, exact)
    grads = torch.randn(2, 2, 3)
    (stats.logprobs * grads[0] + stats.entropy * grads[1]).sum().backward()
    assert_gradient(logits.grad, exact, (*grads, 0.0), grads.abs().sum(0)[..., None] * 8)


@pytest.mark.parametrize("shape", [(), (2,), (2, 1), (2, 3)])
def test_shapes_of_temperature(backend, shape):
    logits, token_ids = random_logits(2, 3, 17), torch.randint(17, (2, 3))
    temperature = torch.rand(shape) + 0.5
    full = temperature[:, None] if temperature.dim() == 1 else temperature
    stats = fastrl.token_stats(logits, token_ids, temperature=temperature, backend=backend)
    assert_statistics(stats, oracle(logits, token_ids, full))


#: Views of logits `[3, 4, V]`.
LAYOUTS = {
    "sliced in time": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "sliced in the vocabulary": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "offset by one": lambda x: torch.cat([x, x], -1)[..., 1 : 1 + x.shape[-1]],
    "strided vocabulary": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1, :1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_give_the_same_as_contiguous(backend, layout, dtype):
    viewed = LAYOUTS[layout](random_logits(3, 4, 333, dtype=dtype)).detach().requires_grad_()
    assert not viewed.is_contiguous()
    plain = viewed.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    token_ids = torch.randint(333, (3, 4))
    outcomes = []
    for logits in (viewed, plain):
        stats = fastrl.token_stats(logits, token_ids, backend=backend)
        (stats.logprobs + 0.1 * stats.entropy).sum().backward()
        outcomes.append((stats.logprobs, stats.entropy, logits.grad))
    for actual, expected in zip(*outcomes, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.not_on("reference")  # eager torch promises no batch invariance
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [257, 50257])
def test_a_row_does_not_depend_on_other_rows(backend, vocabulary, dtype):
    logits = random_logits(9, vocabulary, dtype=dtype)
    token_ids = torch.randint(vocabulary, (9,))

    def outcome(rows):
        x = logits[rows].clone().requires_grad_()
        stats = fastrl.token_stats(x, token_ids[rows], backend=backend)
        (stats.logprobs + stats.entropy).sum().backward()
        return stats.logprobs.detach(), stats.entropy.detach(), x.grad

    alone = zip(*(outcome(slice(i, i + 1)) for i in range(9)), strict=True)
    assert all(map(torch.equal, outcome(slice(9)), map(torch.cat, alone)))
