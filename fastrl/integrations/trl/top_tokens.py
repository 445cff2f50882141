"""The likeliest tokens of a student, and their log-probabilities under a teacher."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastrl import Teacher
from fastrl.integrations.trl.two_models import Side

#: Numbers in a chunk of logits: 256 MiB in fp32.
_CHUNK = 1 << 26


@torch.no_grad()
def top_k_teacher(
    student: Side,
    teacher: Side,
    mask: Tensor,
    count: int,
    *,
    beta: float,
    temperature: float,
    has_tail: bool,
) -> Teacher:
    """Return the teacher's log-probabilities of the student's likeliest tokens.

    Both heads are projected a chunk of rows at a time, so no more logits exist at once.

    Args:
        student: the student's hidden states `[B, K, H]` that predict the tokens, and its head.
        teacher: the teacher's hidden states and head; H may differ.
        mask: 0/1, `[B, K]`; rows with 0 are left out.
        count: the number of tokens in each row.
        beta: selects the divergence, in [0, 1]; see `Teacher`.
        temperature: divides the logits of both models.
        has_tail: whether all other tokens together count as one more event.
    """
    active = mask.reshape(-1) != 0
    ids = torch.zeros((*mask.shape, count), dtype=torch.int64, device=mask.device)
    logprobs = torch.zeros(ids.shape, dtype=torch.float32, device=mask.device)
    found_ids, found = [ids.new_zeros(0, count)], [logprobs.new_zeros(0, count)]
    size = max(_CHUNK // student.head.weight.shape[0], 1)
    parts = (_rows(side.hidden, active, size) for side in (student, teacher))
    for of_student, of_teacher in zip(*parts, strict=True):
        found_ids.append(student.head.logits(of_student).topk(count).indices)
        logits = teacher.head.logits(of_teacher) / temperature
        found.append(logits.gather(-1, found_ids[-1]) - logits.logsumexp(-1, keepdim=True))
    ids.view(-1, count)[active] = torch.cat(found_ids)
    logprobs.view(-1, count)[active] = torch.cat(found)
    return Teacher.from_top_k(ids, logprobs, has_tail=has_tail, beta=beta)


def _rows(hidden: Tensor, active: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the active rows, `size` at a time."""
    rows = hidden.reshape(-1, hidden.shape[-1])[active]
    yield from rows.split(size) if len(rows) else ()
