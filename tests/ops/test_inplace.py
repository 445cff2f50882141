"""Writing gradients over the logits: only on request, and never silently where it would harm."""

import functools

import pytest
import torch

import fastrl

pytestmark = [pytest.mark.kernels, pytest.mark.not_on("triton")]

V = 300
FUNCTIONS = (
    "token_logprobs", "logits_policy_loss", "kept tokens", "a teacher", "K tokens of a teacher",
)  # fmt: skip


def case():
    hidden = torch.randn(6, 8, requires_grad=True)
    weight = torch.randn(8, V, requires_grad=True)
    return hidden, weight, torch.randint(V, (6,)), torch.randn(6), torch.ones(6)


def losses(backend, inplace):
    """The functions with the option, and what else writes over logits, on logits `[6, V]`."""
    kept = fastrl.KeptTokens.from_lists([[]] * 6)  # else the sum of chunks notices
    ids, log_p = torch.arange(18).reshape(6, 3), torch.full((6, 3), -2.0)
    teachers = {
        "a teacher": fastrl.Teacher.from_logits(torch.ones(6, V)),
        "K tokens of a teacher": fastrl.Teacher.from_top_k(ids, log_p),
    }

    def from_stats(logits, token_ids, advantages, mask, **more):
        logprobs = fastrl.token_logprobs(
            logits, token_ids, inplace_backward=inplace, mask=mask, backend=backend, **more
        )
        return -(logprobs * advantages).sum()

    def from_teacher(logits, _, advantages, mask, teacher):
        return advantages @ fastrl.token_divergence(
            logits, teacher, inplace_backward=inplace, mask=mask, backend=backend
        )

    def from_logits(logits, token_ids, advantages, mask):
        return fastrl.logits_policy_loss(
            logits, token_ids, advantages, mask, objective="ppo", inplace=inplace, backend=backend
        ).loss

    return {
        "token_logprobs": from_stats,
        "logits_policy_loss": from_logits,
        "kept tokens": functools.partial(from_stats, kept=kept),
        **{
            name: functools.partial(from_teacher, teacher=teacher)
            for name, teacher in teachers.items()
        },
    }


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_leaf_is_refused(backend, function):
    _, _, *rest = case()
    with pytest.raises(ValueError, match=r"inplace.*=True needs logits that are not a leaf"):
        losses(backend, True)[function](torch.randn(6, V, requires_grad=True), *rest)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_that_share_memory_are_refused(backend, function):
    _, _, *rest = case()
    shared = (torch.randn(1, V, requires_grad=True) * 1).expand(6, V)
    with pytest.raises(ValueError, match="rows do not share memory"):
        losses(backend, True)[function](shared, *rest)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_upstream_op_that_kept_the_logits_notices(backend, function):
    if backend == "reference":
        pytest.skip("the reference never writes over the logits")
    x = torch.randn(6, V, requires_grad=True)
    _, _, *rest = case()
    logits = torch.softmax(x, -1)  # its backward needs its own output
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses(backend, True)[function](logits, *rest).backward()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_losses_on_the_same_logits_notice(backend, function):
    if backend == "reference":
        pytest.skip("the reference never writes over the logits")
    hidden, weight, token_ids, advantages, mask = case()
    logits = hidden @ weight
    other = fastrl.token_logprobs(logits, token_ids, backend=backend).sum()
    first = losses(backend, True)[function](logits, token_ids, advantages, mask)
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_a_use_after_the_loss_notices(backend):
    if backend == "reference":
        pytest.skip("the reference never writes over the logits")
    hidden, weight, token_ids, advantages, mask = case()
    for later in (
        lambda z: z.square().mean(),
        lambda z: fastrl.token_logprobs(z, token_ids, backend=backend).sum(),
    ):
        logits = hidden @ weight
        loss = fastrl.logits_policy_loss(
            logits, token_ids, advantages, mask, inplace=True, objective="ppo", backend=backend
        ).loss
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (loss + later(logits)).backward()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_view_of_a_leaf_is_refused(backend, function):
    _, _, *rest = case()
    leaf = torch.randn(1, 7, V, requires_grad=True)
    with pytest.raises(ValueError, match="not a view of a leaf"):
        losses(backend, True)[function](leaf.view(7, V)[:6], *rest)


def test_a_slice_of_wider_logits(backend):
    """`logits[:, :-1]` is what trainers pass; the last position keeps its own gradient."""
    hidden, weight = torch.randn(2, 4, 8), torch.randn(8, V, requires_grad=True)
    token_ids, advantages, mask = torch.randint(V, (2, 3)), torch.randn(2), torch.ones(2, 3)
    grads = []
    for inplace in (False, True):
        logits = hidden @ weight
        last = logits[:, -1].sum()
        loss = fastrl.logits_policy_loss(
            logits[:, :-1], token_ids, advantages, mask, inplace=inplace, backend=backend
        ).loss
        grads.append(torch.autograd.grad(loss + last + logits[:, -1].sum(), weight)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-7)


def test_logits_of_no_tokens(backend):
    leaf = torch.randn(3, 0, 5, requires_grad=True)
    logits = leaf.transpose(0, 1) * 1  # with strides of 0
    ids = torch.zeros(0, 3, dtype=torch.int64)
    fastrl.token_logprobs(logits, ids, inplace_backward=True, backend=backend).sum().backward()
    assert leaf.grad.shape == leaf.shape
