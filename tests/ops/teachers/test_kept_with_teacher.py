"""Student and teacher over kept tokens: as if the logits of all others were -inf in both."""

import pytest
import torch

import fastrl
from fastrl import KeptTokens, Teacher
from fastrl.ops._head import kept_products
from fastrl.ops._head.projection import Projection
from tests.ops.test_kept_tokens import sets_of

pytestmark = pytest.mark.kernels
B, T, V, WIDTH = 3, 5, 60, 8


def drawn(count, dtype=torch.float32):
    """Hidden states and heads of both, token ids and sets, of which rows have none or all."""
    torch.manual_seed(4)
    student = [torch.randn(B, T, WIDTH).to(dtype), torch.randn(V, WIDTH).to(dtype)]
    teacher = [torch.randn(B, T, 5).to(dtype), torch.randn(V, 5).to(dtype)]
    ids = torch.randint(V, (B, T))
    return student, teacher, ids, sets_of(count, ids.flatten(), V)


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_heads_in_float64(backend, form):
    """A head may be wider than the hidden states; here its numbers are the same."""
    student, teacher, ids, kept = drawn(1)
    lora = torch.randn(2, WIDTH), torch.randn(V, 2), 0.5
    found = []
    for wide in (False, True):
        hidden, a, b = (x.clone().requires_grad_() for x in (student[0], *lora[:2]))
        weights = (teacher[1].double(), b.double()) if wide else (teacher[1], b)
        given = {"teacher": Teacher.from_hidden(teacher[0], weights[0]), "backend": backend}
        given |= {"kept": kept, "outputs": ("logprobs", "divergence")}
        if form == "logits":
            stats = fastrl.token_stats(hidden @ student[1].T, ids, **given)
        else:
            given["lora"] = (a, weights[1], lora[2])
            stats = fastrl.linear_token_stats(hidden, student[1], ids, **given)
        (stats.logprobs + stats.divergence).sum().backward()
        found.append(
            [stats.divergence, hidden.grad, *((a.grad, b.grad) if form == "hidden" else ())]
        )
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_chunks_have_room_for_a_wide_teacher(form, monkeypatch):
    """A teacher's hidden states are gathered and converted, as the student's are."""
    rows, wide, room = 40, 256, 20_000
    monkeypatch.setattr(kept_products, "_CHUNK_BYTES", (room, room))
    seen = []
    project = Projection.project

    def noted(self, *arguments, **more):
        result = project(self, *arguments, **more)
        seen.append(result.states.shape)
        return result

    monkeypatch.setattr(Projection, "project", noted)
    ids = torch.randint(V, (rows,))
    kept, teacher = KeptTokens.from_lists([[1]] * rows), torch.randn(rows, wide)
    given = {"kept": kept, "teacher": Teacher.from_hidden(teacher, torch.randn(V, wide))}
    given["outputs"] = ("divergence",)
    if form == "logits":
        fastrl.token_stats(torch.randn(rows, V), ids, **given)
    else:
        fastrl.linear_token_stats(torch.randn(rows, 4), torch.randn(V, 4), ids, **given)
    counts = [count for count, width in seen if width == wide]
    assert sum(counts) == rows
    assert max(counts) * 3 * 4 * wide <= room


def test_a_set_without_the_teachers_tokens(backend):
    """A token that the teacher excludes costs what it costs without sets: infinity, or nothing."""
    ids, kept = torch.tensor([0, 0]), KeptTokens.from_lists([[0, 1], [0, 2]])
    only = KeptTokens.from_lists([[1], [1, 2]])  # without a distribution of the teacher, and with
    logits, other = torch.zeros(2, 4).requires_grad_(), torch.zeros(2, 4)
    other[:, 1] = -torch.inf
    teacher, outputs = Teacher.from_logits(other, beta=1.0), ("divergence",)
    given = {"kept": kept, "outputs": outputs, "backend": backend}
    found = fastrl.token_stats(logits, ids, teacher=teacher, **given).divergence
    assert found.tolist() == [float("inf"), 0.0]
    forward = fastrl.token_stats(logits, ids, teacher=teacher._replace(beta=0.0), **given)
    torch.testing.assert_close(forward.divergence, torch.tensor([2.0, 1.0]).log())
    none = fastrl.token_stats(logits, ids + 1, teacher=teacher, **given | {"kept": only})
    assert none.divergence.isnan().tolist() == [True, False]


def test_the_log_probabilities_of_some_tokens_are_refused():
    teacher = Teacher.from_top_k(torch.tensor([[1]]), torch.tensor([[-0.1]]))
    kept = KeptTokens.from_lists([[1]])
    with pytest.raises(ValueError, match="kept must be None with a teacher of some tokens"):
        fastrl.token_stats(torch.zeros(1, 4), torch.tensor([1]), teacher=teacher, kept=kept)
