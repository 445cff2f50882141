"""What `fastrl bench` measures: an operator on a shape, computed by everyone who can."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

import torch

from fastrl.bench.case import BACKWARD, FORWARD, PASSES, Case, Size
from fastrl.bench.cases import divergence, kept_tokens, linear, logits, tokens
from fastrl.bench.cases.kept_tokens import KEPT
from fastrl.bench.cases.selections import SELECTIONS
from fastrl.bench.inputs import AUTOCAST, FROZEN, MASKED, PACKED, SLICED, WITH_TEACHER
from fastrl.bench.models import MODELS
from fastrl.bench.peers import Participants, participants

__all__ = ["OPS", "SELECTIONS", "WITHOUT_BACKWARD", "Size", "cases"]


def _linear_policy_loss(size: Size, step: str, who: Participants) -> Case:
    if size.variant == WITH_TEACHER:
        return divergence.loss_with_teacher(size, step, who)
    if size.variant.endswith("kept"):
        return kept_tokens.loss_of_kept(size, step, who)
    return linear.linear_policy_loss(size, step, who)


Make = Callable[[Size, str, Participants], Case]
#: What makes the case of a size and a pass, and regular expressions of its variants.
OPS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "token_logprobs": (logits.token_logprobs, (SLICED,)),
    "token_stats": (logits.token_stats, (SLICED,)),
    "logits_policy_loss": (logits.logits_policy_loss, (MASKED, PACKED, SLICED)),
    "linear_token_logprobs": (linear.linear_token_logprobs, ()),
    "linear_policy_loss": (_linear_policy_loss, (MASKED, AUTOCAST, FROZEN, WITH_TEACHER, KEPT)),
    "token_divergence": (divergence.token_divergence, tuple(divergence.BETAS)),
    "linear_divergence": (divergence.linear_divergence, tuple(divergence.BETAS)),
    "policy_loss": (tokens.policy_loss, (tokens.SEQUENCE_LEVEL, tokens.LEVEL_AND_LENGTH)),
    "gae": (tokens.gae, (tokens.LENGTH,)),
    "group_advantages": (tokens.group_advantages, (tokens.GROUPS,)),
}
WITHOUT_BACKWARD = ("gae", "group_advantages")
WITHOUT_MODEL = ("policy_loss", *WITHOUT_BACKWARD)
COMPILED = ("linear_policy_loss", "logits_policy_loss")  # by torch, also where time is short


def cases(
    sizes: Sequence[Size],
    steps: Sequence[str],
    device: torch.device,
    backends: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    *,
    sparing: bool = False,
) -> list[Case]:
    """Return the cases of these sizes and passes, in order, each once.

    Args:
        sizes: What is measured.
        steps: Of ``forward``, ``backward`` and ``both``. Operators without a backward pass have
            ``forward`` in the place of ``both``, and no case of ``backward``.
        device: Where the inputs are made.
        backends: Of fastrl; None: all that have kernels here, or else the reference. One that is
            unavailable fails.
        peers: Names in ``PEERS``; None: all that are installed. Another one fails.
        sparing: Of torch's forms, leave out those without a cast to float32, and torch.compile but
            in the first cases of two operators.

    Raises:
        ValueError: a name or a number is not known.

    Examples:
        >>> import torch
        >>> from fastrl.bench.cases import SELECTIONS, cases
        >>> found = cases(SELECTIONS["smoke"][:1], ["forward"], torch.device("cpu"))
        >>> found[0].name
        'token_logprobs, forward, tiny, 16 x 500, float32'
    """
    who = participants(device, backends, peers)
    firsts = {op: next((one for one in sizes if one.op == op), None) for op in COMPILED}
    for step in steps:
        _known("steps", step, PASSES)
    made: list[Case] = []
    for size in sizes:
        _known("op", size.op, OPS)
        make, variants = OPS[size.op]
        _known("model", size.model, ("",) if size.op in WITHOUT_MODEL else MODELS)
        if not any(re.fullmatch(known, size.variant) for known in ("", *variants)):
            known = "; ".join(variants)
            raise ValueError(
                f"variant of {size.op} must match one of {known}, got {size.variant!r}"
            )
        if size.rows < 1:
            raise ValueError(f"rows must be at least 1, got {size.rows}")
        passes = steps
        if size.op in WITHOUT_BACKWARD:
            passes = [FORWARD for step in steps if step != BACKWARD]
        takes_part = who
        if sparing:
            left = [one for one in who.peers if one != "compile" or size in firsts.values()]
            takes_part = who._replace(peers=tuple(left), narrow=False)
        made += [make(size, step, takes_part) for step in passes]
    return [*{case.name: case for case in made}.values()]


def _known(argument: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        listed = ", ".join(one or "''" for one in names)
        raise ValueError(f"{argument} must be among {listed}, got {name!r}")
