"""`loss.backward()` on a GPU: the kernel that multiplies the finished gradient by the factor.

Compiled for one, and executed.
"""

import pytest
import torch

import fastrl
from fastrl.ops._autograd import known_gradient

# which multiply by torch
pytestmark = [pytest.mark.kernels_alone, pytest.mark.usefixtures("on_gpu")]


@pytest.fixture
def on_gpu(backend, monkeypatch):
    """Let the backward treat the tensors of a test as those of a GPU."""
    monkeypatch.setattr(known_gradient, "_on_gpu", lambda factor: True)


@pytest.fixture
def scaled(monkeypatch):
    """The gradients that were given to the kernel."""
    found = []

    class Recorder:
        def __init__(self, name):
            self.operators = fastrl.library.operators(name)

        def scale_(self, gradient, factor):
            found.append(gradient)
            return self.operators.scale_(gradient, factor)

    monkeypatch.setattr(known_gradient, "operators", Recorder)
    return found


def gradient(backend, factor, *, dtype=torch.bfloat16, sliced=False, transposed=False, **options):
    torch.manual_seed(1)
    leaf = (torch.randn(3, 6, 50) * 3).to(dtype)
    if transposed:
        leaf = leaf.transpose(0, 1).contiguous().transpose(0, 1)
    leaf.requires_grad_()
    logits = leaf * 1 if options.get("inplace") else leaf
    logits = logits[:, :-1] if sliced else logits
    ids, mask = torch.randint(50, logits.shape[:2]), torch.ones(logits.shape[:2])
    loss = fastrl.logits_policy_loss(
        logits, ids, torch.randn(3), mask, backend=backend, **options
    ).loss
    (loss if factor is None else loss * factor).backward()
    return leaf.grad


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", [{}, {"sliced": True}, {"transposed": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_factor_multiplies_the_gradient_once(backend, scaled, dtype, layout, inplace):
    given = {"dtype": dtype, "inplace": inplace, **layout}
    whole = gradient(backend, None, **given)
    half = gradient(backend, 0.5, **given)
    third = gradient(backend, torch.tensor(0.3), **given)
    assert torch.equal(half, whole * 0.5)
    assert torch.equal(third, (whole.float() * torch.tensor(0.3)).to(dtype))
    assert len(scaled) == 3


def test_the_gradients_of_hidden_states_and_head_are_multiplied_alike(backend, scaled):
    torch.manual_seed(2)
    hidden, weight = torch.randn(2, 5, 8), torch.randn(20, 8)
    ids, advantages, mask = torch.randint(20, (2, 5)), torch.randn(2), torch.ones(2, 5)
    outcomes = []
    for factor in (1.0, 0.25):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = fastrl.linear_policy_loss(*leaves, ids, advantages, mask, backend=backend).loss
        (loss * factor).backward()
        outcomes.append([leaf.grad for leaf in leaves])
    for one, quarter in zip(*outcomes, strict=True):
        assert torch.equal(one * 0.25, quarter)
    assert [x.numel() for x in scaled] == [hidden.numel(), weight.numel()] * 2


@pytest.mark.parametrize("rows", [slice(None), slice(-1)])
def test_the_rows_of_a_padded_vocabulary_are_scaled_by_the_kernel(backend, scaled, rows):
    leaf = torch.randn(3, 6, 56).requires_grad_()
    logits = (leaf * 1)[:, rows, :50]
    ids, mask = torch.randint(50, logits.shape[:2]), torch.ones(logits.shape[:2])
    loss = fastrl.logits_policy_loss(
        logits, ids, torch.randn(3), mask, inplace=True, backend=backend
    ).loss
    loss.backward()
    two_distances = rows != slice(None)  # of rows and of sequences: left to torch
    assert len(scaled) == (0 if two_distances else 1)


def test_a_retained_graph_keeps_its_gradient(backend, scaled):
    leaf = torch.randn(2, 3, 10).requires_grad_()
    ids, mask = torch.randint(10, (2, 3)), torch.ones(2, 3)
    loss = fastrl.logits_policy_loss(leaf, ids, torch.randn(2), mask, backend=backend).loss
    (first,) = torch.autograd.grad(loss, leaf, torch.tensor(2.0), retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(first, 2 * second)
    assert len(scaled) == 2
