"""What `fastrl bench` measures: an operator on a shape, computed by everyone who can."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

import torch

from fastrl.bench.case import PASSES, Case
from fastrl.bench.cases import divergence, kept_tokens, linear, logits, tokens
from fastrl.bench.cases.selections import SELECTIONS
from fastrl.bench.inputs import AUTOCAST, FROZEN, MASKED, PACKED, SLICED, WITH_TEACHER, Size
from fastrl.bench.models import MODELS
from fastrl.bench.peers import Participants, participants

__all__ = ["OPS", "SELECTIONS", "WITHOUT_MODEL", "Size", "cases"]


def _linear_policy_loss(size: Size, step: str, who: Participants) -> Case:
    if size.variant == WITH_TEACHER:
        return divergence.loss_with_teacher(size, step, who)
    if size.variant.endswith("kept"):
        return kept_tokens.loss_of_kept(size, step, who)
    return linear.linear_policy_loss(size, step, who)


#: From size, pass and participants to the case, or None where the pass has no meaning.
OPS: dict[str, Callable[[Size, str, Participants], Case | None]] = {
    "token_logprobs": logits.token_logprobs,
    "token_stats": logits.token_stats,
    "logits_policy_loss": logits.logits_policy_loss,
    "linear_token_logprobs": linear.linear_token_logprobs,
    "linear_policy_loss": _linear_policy_loss,
    "token_divergence": divergence.token_divergence,
    "linear_divergence": divergence.linear_divergence,
    "policy_loss": tokens.policy_loss,
    "gae": tokens.gae,
    "group_advantages": tokens.group_advantages,
}
WITHOUT_MODEL = ("policy_loss", "gae", "group_advantages")
#: Regular expressions of what may be unusual about a case.
VARIANTS: dict[str, tuple[str, ...]] = {
    "token_logprobs": (SLICED,),
    "token_stats": (SLICED,),
    "logits_policy_loss": (MASKED, PACKED, SLICED),
    "linear_token_logprobs": (),
    "linear_policy_loss": (MASKED, AUTOCAST, FROZEN, WITH_TEACHER, r"[1-9]\d* kept"),
    "token_divergence": tuple(divergence.BETAS),
    "linear_divergence": tuple(divergence.BETAS),
    "policy_loss": (tokens.SEQUENCE_LEVEL, f"({tokens.SEQUENCE_LEVEL}, )?{tokens.LENGTH}"),
    "gae": (tokens.LENGTH,),
    "group_advantages": (tokens.GROUPS,),
}


def cases(
    sizes: Sequence[Size],
    steps: Sequence[str],
    device: torch.device,
    backends: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
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
    for step in steps:
        _known("steps", step, PASSES)
    for size in sizes:
        _known("op", size.op, OPS)
        _known("model", size.model, ("",) if size.op in WITHOUT_MODEL else MODELS)
        if not any(re.fullmatch(known, size.variant) for known in ("", *VARIANTS[size.op])):
            known = "; ".join(VARIANTS[size.op])
            raise ValueError(
                f"variant of {size.op} must match one of {known}, got {size.variant!r}"
            )
        if size.rows < 1:
            raise ValueError(f"rows must be at least 1, got {size.rows}")
    made = (OPS[size.op](size, step, who) for size in sizes for step in steps)
    return [*{case.name: case for case in made if case is not None}.values()]


def _known(argument: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        listed = ", ".join(one or "''" for one in names)
        raise ValueError(f"{argument} must be among {listed}, got {name!r}")
