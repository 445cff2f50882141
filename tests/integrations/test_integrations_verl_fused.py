"""verl's log-probabilities and entropies without logits: `use_fused_kernels=True`."""

import pytest
import torch

from fastrl.integrations.verl.fused_linear import FusedLinearForPPO, linear_cross_entropy
from tests.support.verl_fused_formulas import fused, fused_inputs, gradients

#: tokens, hidden size, vocabulary: verl's Triton kernel needs a multiple of 128 and was once wrong
#: for vocabularies that its tiles do not divide
SIZES = [(193, 128, 1520), (217, 96, 1519), (7, 40, 1), (1, 16, 33)]


CALLS = {
    "FusedLinearForPPO": lambda *a, **k: FusedLinearForPPO(chunk_size=32)(*a, **k),
    "linear_cross_entropy": linear_cross_entropy,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_values_and_gradients(name, sizes, dtype, temperature):
    hidden, weight, labels, upstream = fused_inputs(*sizes, dtype)
    found = CALLS[name](hidden, weight, labels, temperature)
    expected = fused(hidden, weight, labels, temperature)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double().flatten(), b, rtol=1e-5, atol=1e-5)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for some in (upstream, (upstream[0], None), (None, upstream[1])):
        grads = [
            gradients(f(hidden, weight, labels, temperature), some, (hidden, weight))
            for f in (CALLS[name], fused)
        ]
        for a, b in zip(*grads, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a, b, **close)


def test_shapes():
    hidden, weight, labels, _ = fused_inputs(6, 16, 33)
    module = FusedLinearForPPO()
    for shape in [(6,), (1, 6), (2, 3)]:
        logprobs, entropy = module(hidden.reshape(*shape, 16), weight, labels.reshape(shape))
        assert logprobs.shape == entropy.shape == shape
    # Megatron's hidden states are [T, 1, H] and its labels [1, T]
    flat = linear_cross_entropy(hidden.transpose(0, 1), weight, labels, 1.0, "none", None)
    assert [x.shape for x in flat] == [(6,), (6,)]
    torch.testing.assert_close(flat[0], logprobs.flatten())


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "Mean"])
def test_reductions_of_the_log_probabilities(reduction):
    hidden, weight, labels, upstream = fused_inputs(5, 16, 33)
    logprobs, entropy = linear_cross_entropy(hidden, weight, labels, 0.7, reduction)
    expected, H = fused(hidden, weight, labels, 0.7)
    reduce = {"none": lambda x: x, "sum": torch.sum, "mean": torch.mean}[reduction.lower()]
    torch.testing.assert_close(logprobs.double(), reduce(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), H, rtol=1e-5, atol=1e-5)
    total = reduce(expected) if reduction == "none" else reduce(expected)[None]
    some = upstream[0][: len(total)]
    grads = [gradients((x,), (some,), hidden)[0] for x in (logprobs, total)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_bad_arguments():
    hidden, weight, labels, _ = fused_inputs(5, 16, 33)
    with pytest.raises(ValueError, match="reduction must be one of none, sum, mean, got 'max'"):
        linear_cross_entropy(hidden, weight, labels, 1.0, "max")
    with pytest.raises(TypeError, match="reduction must be a str, got NoneType"):
        linear_cross_entropy(hidden, weight, labels, reduction=None)
    with pytest.raises(ValueError, match="impl_backend must be one of torch, liger, got 'triton'"):
        FusedLinearForPPO(impl_backend="triton")
    with pytest.raises(ValueError, match="temperature must be"):
        FusedLinearForPPO()(hidden, weight, labels, temperature=0.0)
    with pytest.raises(TypeError, match="vocab_group must be"):
        linear_cross_entropy(hidden, weight, labels, 1.0, "none", "tp")


@pytest.mark.parametrize("V", [1024, 1024 + 512, 1519])
def test_a_peaked_distribution_has_no_mass_beyond_the_vocabulary(V):
    """verl's regression test of its Triton kernel: one logit at 3, all others at -15."""
    weight, hidden = torch.zeros(V, 8), torch.zeros(1, 4, 8)
    weight[:, 0], weight[0, 0], hidden[..., 0] = -15.0, 3.0, 1.0
    labels = torch.zeros(1, 4, dtype=torch.int64)
    for a, b in zip(
        linear_cross_entropy(hidden, weight, labels, 1.5),
        fused(hidden, weight, labels, 1.5),
        strict=True,
    ):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_logits_far_below_zero():
    weight, hidden = torch.full((9, 4), -1.0), torch.full((3, 4), 50.0)  # all logits are -200
    logprobs, entropy = linear_cross_entropy(hidden, weight, torch.tensor([0, 4, 8]))
    torch.testing.assert_close(logprobs, torch.full((3,), -torch.tensor(9.0).log()))
    torch.testing.assert_close(entropy, torch.full((3,), torch.tensor(9.0).log()))


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, labels, _ = fused_inputs(5, 16, 33)
    weight.requires_grad_(False)
    logprobs, _ = FusedLinearForPPO()(hidden, weight, labels)
    logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad.shape == hidden.shape


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_temperature_may_be_a_tensor(name, shape):
    hidden, weight, labels, _ = fused_inputs(6, 16, 33)
    hidden, labels = hidden.reshape(2, 3, 16), labels.reshape(2, 3)
    found, expected = (
        CALLS[name](hidden, weight, labels, temperature)
        for temperature in (torch.full(shape, 0.7), 0.7)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", CALLS)
def test_ids_outside_the_vocabulary(name):
    hidden, weight, labels, _ = fused_inputs(5, 16, 33)
    labels[0, 1] = -100
    logprobs, entropy = (x.flatten() for x in CALLS[name](hidden, weight, labels))
    assert logprobs[1] == entropy[1] == 0
    assert (logprobs != 0).sum() == 4
    labels[0, 1] = 33
    with pytest.raises(ValueError, match=r"must lie in \[0, 33\)"):
        CALLS[name](hidden, weight, labels)


def test_a_compiled_module_for_all_lengths():
    hidden, weight, labels, upstream = fused_inputs(12, 16, 33)
    module = FusedLinearForPPO()
    module.compile(backend="aot_eager", dynamic=True)
    for n in (12, 9, 5):
        found = module(hidden[:, :n], weight, labels[:, :n], temperature=1.5)
        some = [g[:n] for g in upstream]
        expected = fused(hidden[:, :n], weight, labels[:, :n], 1.5)
        for a, b in zip(
            gradients(found, some, (hidden, weight)),
            gradients(expected, some, (hidden, weight)),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
