"""What `fastrl bench` measures: an operator on a shape, computed by everyone who can."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

import torch

from fastrl.bench.case import BACKWARD, FORWARD, PASSES, Case, Size
from fastrl.bench.cases import tokens
from fastrl.bench.cases.selections import SELECTIONS
from fastrl.bench.cases.tokens import LEVEL_AND_LENGTH, SEQUENCE_LEVEL
from fastrl.bench.cases.vocabulary import OPERATORS
from fastrl.bench.models import MODELS
from fastrl.bench.peers import Participants, participants

__all__ = ["OPS", "SELECTIONS", "WITHOUT_BACKWARD", "Size", "cases"]


Make = Callable[[Size, str, Participants], Case]
#: What makes the case of a size and a pass, by function and by regular expressions of its variants.
OPS: dict[str, dict[str, Make]] = {
    **{op: {name: one.case for name, one in forms.items()} for op, forms in OPERATORS.items()},
    "policy_loss": dict.fromkeys(("", SEQUENCE_LEVEL, LEVEL_AND_LENGTH), tokens.policy_loss),
    "gae": dict.fromkeys(("", tokens.LENGTH), tokens.gae),
    "group_advantages": dict.fromkeys(("", tokens.GROUPS), tokens.group_advantages),
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
        _known("model", size.model, ("",) if size.op in WITHOUT_MODEL else MODELS)
        makes = [make for one, make in OPS[size.op].items() if re.fullmatch(one, size.variant)]
        if not makes:
            known = "; ".join(filter(None, OPS[size.op]))
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
        made += [makes[0](size, step, takes_part) for step in passes]
    return [*{case.name: case for case in made}.values()]


def _known(argument: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        listed = ", ".join(one or "''" for one in names)
        raise ValueError(f"{argument} must be among {listed}, got {name!r}")
