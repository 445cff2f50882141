"""The Triton kernels of vocabulary size beyond what tests of every backend show of them."""

import importlib
import math

import pytest
import torch

import fastrl
from fastrl import Objective, reference
from fastrl.contract import LossArguments, RowArguments, RowStats
from fastrl.library import operators
from fastrl.triton.runtime.registration import INTERPRETED, OPERATORS
from tests.contract.test_registered_ops import samples

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="runs where TRITON_INTERPRET=1 says so"),
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

VOCABULARY = 20_000  # one whole block and a tail
OBJECTIVE = Objective(kl_coef=0.1, entropy_coef=0.01)
ROWS = RowArguments(
    token_ids=torch.zeros(1, 1, dtype=torch.int64),
    mask=None,
    ignore_index=-100,
    temperatures=None,
    temperature=1.0,
    logit_scale=1.0,
    logit_softcap=0.0,
)


def modules(*names):
    return [importlib.import_module(f"fastrl.triton.vocabulary.{name}") for name in names]


def test_opcheck_of_every_operator():
    seen = set()
    scaled = ("scale_", (torch.randn(2, 3, 40)[:, :-1], torch.tensor(0.5)))
    for name, arguments in (*samples(), scaled):
        by_id = name == "sequence_weights" and arguments[-1] is not None  # torch sorts those
        if name in OPERATORS and not by_id:
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
    assert rows.splits_of(logits) == 2
    for one, split in zip(whole, everything(logits, ids, mask, softcap), strict=True):
        assert torch.equal(one, split)


class Launches:
    """Stands in for a kernel and keeps the grids that it is launched on."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda **arguments: None


def test_rows_are_on_the_first_axis_of_the_grid(monkeypatch):
    """The other two axes end at 65,535 programs."""
    stats, policy = modules("token_stats", "logits_policy_loss")
    launches = Launches()
    monkeypatch.setattr(stats, "token_stats_fwd_kernel", launches)
    monkeypatch.setattr(stats, "token_stats_bwd_kernel", launches)
    monkeypatch.setattr(policy, "logits_policy_loss_kernel", launches)
    logits = torch.zeros(1, 1, 8).expand(70_000, 2, 8)
    row = torch.zeros(1, 1).expand(70_000, 2)
    rows = ROWS._replace(token_ids=row.long(), mask=row.bool())
    stats.token_stats_fwd(logits, *rows, True, True)
    stats.token_stats_bwd(logits, *rows, row, row, row, row, None, None)
    loss = LossArguments(row, row, None, None, None, None, None, None)
    policy.logits_policy_loss_fwd(logits, *rows, *loss, *Objective().arguments)
    assert launches.grids == [(140_000,)] * 3


def test_an_id_outside_the_vocabulary_makes_its_own_row_nan():
    """Meta tensors and GPUs cannot look at ids beforehand; the operator must not read there."""
    logits = torch.randn(1, 3, 50)
    rows = ROWS._replace(token_ids=torch.tensor([[1, 50, -7]]))
    stats = RowStats._make(operators("triton").token_stats_fwd(logits, *rows, True, False))
    assert stats.logprobs.isnan().tolist() == [[False, True, True]]
    saved = (stats.row_max, stats.log_sum, stats.entropy)
    grad = operators("triton").token_stats_bwd(logits, *rows, *saved, torch.ones(1, 3), None, None)
    assert grad.isnan().any(-1).tolist() == [[False, True, True]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16], ids=str)
def test_rows_that_do_not_count_are_zero_whatever_their_id(dtype):
    logits, row = torch.randn(2, 2, 40), torch.ones(2, 2)
    ids = torch.tensor([[3, -100], [99, 5]])
    mask = torch.tensor([[1, 1], [0, 1]]).to(dtype)
    rows = ROWS._replace(token_ids=ids, mask=mask)
    stats = RowStats._make(operators("triton").token_stats_fwd(logits, *rows, True, True))
    counts = torch.tensor([[True, False], [False, True]])
    for stat in stats[:4]:
        assert torch.equal(stat != 0, counts)
    saved = (stats.row_max, stats.log_sum, stats.entropy)
    grad = operators("triton").token_stats_bwd(logits, *rows, *saved, row, row, row)
    loss = LossArguments(row, row, None, None, None, None, None, None)
    logprobs, entropy, in_one_pass = operators("triton").logits_policy_loss_fwd(
        logits, *rows, *loss, *Objective().arguments
    )
    assert torch.equal(logprobs, stats.logprobs)
    assert torch.equal(entropy, stats.entropy)
    for gradient in (grad, in_one_pass):
        assert torch.equal((gradient != 0).any(-1), counts)


@pytest.mark.parametrize("bounds", [None, (0, 2, 2, 6)], ids=["padded", "packed"])
def test_constants_per_sequence_are_those_of_its_tokens(bounds):
    shape, sequences = ((2, 3), 2) if bounds is None else ((1, 6), 3)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    logits, old = torch.randn(*shape, 40), torch.randn(shape) - 4
    rows = ROWS._replace(token_ids=torch.randint(40, shape))
    objective = OBJECTIVE.arguments
    per_sequence = [torch.randn(sequences) for _ in range(5)]
    tokens = torch.ones(shape, dtype=torch.bool)
    of = reference.sequences_of(tokens, cu_seqlens)
    per_token = [of.per_token(x, tokens).contiguous() for x in per_sequence]
    found, expected = (
        operators("triton").logits_policy_loss_fwd(
            logits, *rows, *LossArguments(*constants, old, old + 0.1, bound), *objective
        )
        for constants, bound in ((per_sequence, cu_seqlens), (per_token, None))
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


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
