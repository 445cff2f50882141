"""The Triton kernels of vocabulary size beyond what tests of every backend show of them."""

import importlib
import math

import pytest
import torch
from test_registered_ops import samples

import fastrl
from fastrl import Objective
from fastrl.library import operators
from fastrl.triton.runtime.registration import INTERPRETED, OPERATORS

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="runs where TRITON_INTERPRET=1 says so"),
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

VOCABULARY = 20_000  # one whole block and a tail
OBJECTIVE = Objective(kl_coef=0.1, entropy_coef=0.01)


def modules(*names):
    return [importlib.import_module(f"fastrl.triton.{name}") for name in names]


def test_opcheck_of_every_operator():
    seen = set()
    for name, arguments in samples():
        if name in OPERATORS:
            operator = getattr(operators("triton"), name).default
            torch.library.opcheck(operator, arguments)
            seen.add(name)
    assert seen == set(OPERATORS)


def everything(logits, ids, mask, softcap):
    """Statistics, their gradient, and the policy loss, fresh and in place."""
    outcomes = []
    leaf = logits.clone().requires_grad_()
    stats = fastrl.token_stats(
        leaf,
        ids,
        mask=mask,
        outputs=fastrl.TokenStats._fields,
        logit_softcap=softcap,
        backend="triton",
    )
    (stats.logprobs + 0.3 * stats.entropy - 0.1 * stats.logsumexp).sum().backward()
    outcomes += [*stats, leaf.grad]
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        result = fastrl.logits_policy_loss(
            leaf * 1.0,
            ids,
            torch.tensor([1.0, -0.5]),
            mask,
            old_logprobs=stats.logprobs.detach(),
            ref_logprobs=stats.logprobs.detach() + 0.1,
            objective=OBJECTIVE,
            logit_softcap=softcap,
            inplace=inplace,
            backend="triton",
        )
        result.loss.backward()
        outcomes += [result.loss, result.metrics["entropy"], leaf.grad]
    return outcomes


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_split_over_programs_is_the_same_to_the_bit(monkeypatch, dtype, softcap):
    logits = (torch.randn(2, 2, VOCABULARY) * 3).to(dtype)
    logits[0, 0, 5] = logits[1, 1, VOCABULARY - 2] = -math.inf
    ids, mask = torch.tensor([[7, 3], [0, VOCABULARY - 1]]), torch.tensor([[1, 1], [0, 1]])
    whole = everything(logits, ids, mask, softcap)
    (rows,) = modules("rows")
    monkeypatch.setattr(rows, "processors", lambda device: 10**6)
    assert rows.parts_of(logits) == 2
    for one, parts in zip(whole, everything(logits, ids, mask, softcap), strict=True):
        assert torch.equal(one, parts)


class Launches:
    """Stands in for a kernel and keeps the grids that it is launched on."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda **arguments: None


def test_rows_stand_on_the_first_axis_of_the_grid(monkeypatch):
    """The other two axes end at 65,535 programs."""
    stats, loss = modules("token_stats", "logits_policy_loss")
    launches = Launches()
    monkeypatch.setattr(stats, "_token_stats_fwd", launches)
    monkeypatch.setattr(stats, "_token_stats_bwd", launches)
    monkeypatch.setattr(loss, "_logits_policy_loss", launches)
    logits = torch.zeros(1, 1, 8).expand(70_000, 2, 8)
    row = torch.zeros(1, 1).expand(70_000, 2)
    options = (row.long(), row.bool(), None, 1.0, 1.0, 0.0)
    stats.token_stats_fwd(logits, *options, True, True)
    stats.token_stats_bwd(logits, *options, row, row, row, row, None, None)
    coefficients = [0.2, 0.2, *[math.inf] * 2, 1.0, 1.0, 0.0, *[math.inf] * 3, 0.0]
    loss.logits_policy_loss_fwd(logits, *options, row, row, *[None] * 4, 0, 0, 0, coefficients)
    assert launches.grids == [(140_000,)] * 3


def test_an_id_outside_the_vocabulary_makes_its_own_row_nan():
    """Meta tensors and GPUs cannot look at ids beforehand; the operator must not read there."""
    logits = torch.randn(1, 3, 50)
    options = (torch.tensor([[1, 50, -7]]), torch.ones(1, 3, dtype=torch.bool), None, 1.0, 1.0, 0.0)
    logprobs, entropy, *_, row_max, log_sum = operators("triton").token_stats_fwd(
        logits, *options, True, False
    )
    assert logprobs.isnan().tolist() == [[False, True, True]]
    grad = operators("triton").token_stats_bwd(
        logits, *options, row_max, log_sum, entropy, torch.ones(1, 3), None, None
    )
    assert grad.isnan().any(-1).tolist() == [[False, True, True]]


def test_rows_without_a_gradient_get_zeros_whatever_they_hold():
    logits = torch.randn(1, 3, 40)
    logits[0, 1] = math.nan
    ids, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 0, 1]])
    leaf = logits.clone().requires_grad_()
    result = fastrl.logits_policy_loss(
        leaf * 1.0, ids, torch.tensor([[1.0, 1.0, 0.0]]), mask, inplace=True, backend="triton"
    )
    result.loss.backward()
    assert torch.equal(leaf.grad[0, 1:], torch.zeros(2, 40))
    assert leaf.grad[0, 0].abs().sum() > 0


def test_logprobs_are_never_above_zero():
    """Also where a token has all of the probability, and where the logits share a large offset."""
    for offset in (0.0, -30.0, 1e4):
        logits = torch.full((8, 300), offset - 90.0)
        ids = torch.arange(8)
        logits[ids, ids] = offset + torch.rand(8)
        stats = fastrl.token_stats(logits, ids, temperature=0.7, backend="triton")
        assert (stats.logprobs <= 0).all()
        assert (stats.logprobs > -1e-6).all()
        assert ((stats.entropy >= 0) & (stats.entropy < 1e-6)).all()


def test_logits_of_any_size_have_a_softmax():
    for size in (1e9, 1e12, 1e30):
        logits = size * torch.randn(1, 2, 300)
        ids = logits.argmax(-1)
        stats = fastrl.token_stats(logits, ids, backend="triton")
        assert torch.equal(stats.logprobs, torch.zeros(1, 2))
        assert torch.equal(stats.entropy, torch.zeros(1, 2))


def test_linear_forms_run_on_the_kernels():
    hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    ids, mask = torch.randint(50, (6,)), torch.tensor([1, 1, 0, 1, 1, 1])
    outcomes = []
    for backend in ("triton", "reference"):
        result = fastrl.linear_policy_loss(
            hidden,
            weight,
            ids,
            torch.arange(6) - 2.5,
            mask,
            cu_seqlens=torch.tensor([0, 2, 6], dtype=torch.int32),
            old_logprobs=torch.full((6,), -3.0),
            ref_logprobs=torch.full((6,), -3.2),
            objective=OBJECTIVE,
            chunk_tokens=4,
            backend=backend,
        )
        scored = fastrl.linear_token_logprobs(hidden, weight, ids, mask=mask, backend=backend)
        total = result.loss + scored.sum()
        outcomes.append((total.detach(), *torch.autograd.grad(total, (hidden, weight))))
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
