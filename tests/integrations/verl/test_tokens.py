"""verl's log-probabilities and entropies, of logits and of hidden states, on fastrl."""

import sys
import types

import pytest
import torch

import fastrl
from fastrl import native
from fastrl.integrations import verl
from fastrl.integrations.verl.fused_linear import FusedLinearForPPO, linear_cross_entropy
from tests.integrations.compared import close, outcome
from tests.integrations.verl import formulas
from tests.integrations.verl.cases import OURS, fused_inputs, gradients

#: name -> what follows the logits, for these labels
TOKENS = {
    "logprobs_from_logits": lambda labels: (labels,),
    "entropy_from_logits": lambda labels: (),
    "entropy_from_logits_with_chunking": lambda labels: (2,),
}
FUSED = {
    "FusedLinearForPPO": lambda *a, **k: FusedLinearForPPO(chunk_size=32)(*a, **k),
    "linear_cross_entropy": linear_cross_entropy,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("name", TOKENS)
def test_token_functions(theirs, name, shape, dtype):
    torch.manual_seed(0)
    logits, labels = (3 * torch.randn(*shape, 50)).to(dtype), torch.randint(50, shape)
    before, rest = logits.clone(), TOKENS[name](labels)
    a = outcome(lambda x: getattr(OURS, name)(x, *rest), logits)
    if name == "entropy_from_logits_with_chunking":  # verl's takes two dimensions only
        name, rest = "entropy_from_logits", ()
    b = outcome(lambda x: getattr(theirs, name)(x, *rest), logits.float())
    assert (a[0].shape, a[0].dtype) == (shape, torch.float32)
    assert torch.equal(logits, before)
    close(a[0], b[0])
    close(a[1], b[1], 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3)])
def test_the_sum_of_squared_probabilities(theirs, dtype, shape):
    torch.manual_seed(0)
    logits = (3 * torch.randn(*shape, 17)).to(dtype)
    logits[..., 2] = -torch.inf
    found = OURS.calculate_sum_pi_squared_from_logits(logits.clone().requires_grad_())
    assert (found.shape, found.dtype, found.requires_grad) == (shape, torch.float32, False)
    close(found, theirs.calculate_sum_pi_squared_from_logits(logits.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_probabilities_overwrite_no_logits_that_others_have_saved(dtype):
    leaf, labels = (3 * torch.randn(4, 11)).to(dtype), torch.arange(4)

    def both(functions, x):
        logits = x * 1
        entropy = functions.entropy_from_logits(logits)
        return entropy + functions.logprobs_from_logits(logits, labels)

    (found, a), (expected, b) = (
        outcome(lambda y, n=n: both(n, y), x) for n, x in ((OURS, leaf), (formulas, leaf.double()))
    )
    close(found, expected)
    close(a, b, 1e-2 if dtype.itemsize == 2 else 1e-5)


def test_log_probabilities_overwrite_the_logits_where_verl_does(monkeypatch):
    flag = types.SimpleNamespace(FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE=True)
    monkeypatch.setitem(sys.modules, "verl.utils.torch_functional", flag)
    leaf = torch.randn(4, 11, requires_grad=True)

    def logits_after(logits):
        verl.logprobs_from_logits(logits, torch.arange(4)).sum().backward()
        return logits.detach()

    if fastrl.get_backend() == "auto" and native.missing is None:
        close(logits_after(leaf * 1.0), leaf.grad)  # the gradient has overwritten the logits
    leaf_of_its_own = leaf.detach().clone().requires_grad_()
    close(logits_after(leaf_of_its_own), leaf.detach())  # a leaf keeps its values
    monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", "1")  # verl asks at each call
    close(logits_after(leaf * 1.0), leaf.detach())


#: tokens, hidden size, vocabulary, temperature: verl's Triton kernel needs a multiple of 128 and
#: was once wrong for vocabularies that its tiles do not divide
SIZES = [(193, 128, 1520, 1.5), (217, 96, 1519, 1.0), (7, 40, 1, 1.5), (1, 16, 33, 0.7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", FUSED)
def test_without_logits(name, sizes, dtype):
    *sizes, temperature = sizes
    hidden, weight, labels, upstream = fused_inputs(*sizes, dtype)
    found = FUSED[name](hidden, weight, labels, temperature)
    assert {x.dtype for x in found} == {torch.float32}
    expected = formulas.linear(hidden, weight, labels, temperature)
    close([x.flatten() for x in found], expected)
    for some in (upstream, (upstream[0], None), (None, upstream[1])):
        a, b = (
            gradients(f(hidden, weight, labels, temperature), some, (hidden, weight))
            for f in (FUSED[name], formulas.linear)
        )
        assert {x.dtype for x in a} == {dtype}
        close(a, b, 1e-5 if dtype == torch.float32 else 2e-2)


def test_a_peaked_distribution_has_no_mass_beyond_the_vocabulary():
    """verl's regression test of its Triton kernel: one logit at 3, all others at -15."""
    weight, hidden = torch.zeros(1519, 8), torch.zeros(1, 4, 8)
    weight[:, 0], weight[0, 0], hidden[..., 0] = -15.0, 3.0, 1.0
    given = (hidden, weight, torch.zeros(1, 4, dtype=torch.int64), 1.5)
    close(linear_cross_entropy(*given), formulas.linear(*given))


def test_shapes():
    hidden, weight, labels, _ = fused_inputs(6, 16, 33)
    for shape in [(6,), (1, 6), (2, 3)]:
        logprobs, entropy = FusedLinearForPPO()(
            hidden.reshape(*shape, 16), weight, labels.reshape(shape)
        )
        assert logprobs.shape == entropy.shape == shape
    # Megatron's hidden states are [T, 1, H] and its labels [1, T]
    flat = linear_cross_entropy(hidden.transpose(0, 1), weight, labels, 1.0, "none", None)
    assert [x.shape for x in flat] == [(6,), (6,)]
    close(flat[0], logprobs.flatten())


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "Mean"])
def test_reductions_of_the_log_probabilities(reduction):
    hidden, weight, labels, _ = fused_inputs(5, 16, 33)
    reduce = {"none": lambda x: x, "sum": torch.sum, "mean": torch.mean}[reduction.lower()]
    expected, entropy = formulas.linear(hidden, weight, labels, 0.7)
    found = linear_cross_entropy(hidden, weight, labels, 0.7, reduction)
    close(found, (reduce(expected), entropy))
    grads = [torch.autograd.grad(x.sum(), hidden)[0] for x in (found[0], reduce(expected))]
    close(*grads)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("name", FUSED)
def test_the_temperature_may_be_a_tensor(name, shape):
    hidden, weight, labels, _ = fused_inputs(6, 16, 33)
    given = (hidden.reshape(2, 3, 16), weight, labels.reshape(2, 3))
    close(FUSED[name](*given, torch.full(shape, 0.7)), FUSED[name](*given, 0.7))


@pytest.mark.parametrize("name", FUSED)
def test_ids_outside_the_vocabulary(name):
    hidden, weight, labels, _ = fused_inputs(5, 16, 33)
    labels[0, 1] = -100
    logprobs, entropy = (x.flatten() for x in FUSED[name](hidden, weight, labels))
    assert logprobs[1] == entropy[1] == 0
    assert (logprobs != 0).sum() == 4
    labels[0, 1] = 33
    with pytest.raises(ValueError, match=r"must lie in \[0, 33\)"):
        FUSED[name](hidden, weight, labels)


@pytest.mark.parametrize("name", ["entropy_from_logits", "logprobs_from_logits", "fused"])
def test_one_compiled_function_for_all_lengths(name):
    """As verl's engines compile the token functions, and its models the fused module."""
    hidden, weight, labels, _ = fused_inputs(9, 16, 33)
    function = FusedLinearForPPO() if name == "fused" else getattr(verl, name)
    compiled = torch.compile(function, dynamic=True, fullgraph=name != "fused", backend="aot_eager")
    for n in (9, 7, 5):
        some = labels[0, :n]
        if name == "fused":
            x, rest = hidden[0, :n].detach(), (weight, some)
        else:
            x, rest = torch.randn(n, 33), (some,) if name == "logprobs_from_logits" else ()
        a, b = (outcome(lambda y, f=f, r=rest: f(y * 1.0, *r), x) for f in (compiled, function))
        close(a, b)
