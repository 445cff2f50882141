"""What `fastrl bench` measures: an operator on a shape, computed by everyone who can."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from fastrl.bench.case import PASSES, Case
from fastrl.bench.cases import logits
from fastrl.bench.cases.logits import Size
from fastrl.bench.models import MODELS
from fastrl.bench.peers import Participants, participants

__all__ = ["OPS", "SELECTIONS", "Size", "cases"]

#: From size, pass and participants to the case, or None where the pass has no meaning.
OPS: dict[str, Callable[[Size, str, Participants], Case | None]] = {
    "token_logprobs": logits.token_logprobs,
    "token_stats": logits.token_stats,
    "logits_policy_loss": logits.logits_policy_loss,
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "token_logprobs": (logits.SLICED,),
    "token_stats": (logits.SLICED,),
    "logits_policy_loss": logits.VARIANTS,
}
WITHOUT_MODEL: tuple[str, ...] = ()


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
        steps: Of ``forward``, ``backward`` and ``both``; those without a meaning are left out.
        device: Where the inputs are made.
        backends: Of fastrl; None: those available on the device. One that is unavailable fails.
        peers: Names in ``PEERS``; None: all. One that is not installed fails.

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
        if not any(size.variant == known for known in ("", *VARIANTS[size.op])):
            raise ValueError(
                f"variant of {size.op} must be among {VARIANTS[size.op]}, got {size.variant!r}"
            )
        if size.rows < 1:
            raise ValueError(f"rows must be at least 1, got {size.rows}")
    made = (OPS[size.op](size, step, who) for size in sizes for step in steps)
    return [*{case.name: case for case in made if case is not None}.values()]


def _known(argument: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        raise ValueError(f"{argument} must be among {', '.join(names)}, got {name!r}")


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SELECTIONS: dict[str, list[Size]] = {
    "smoke": [
        Size("token_logprobs", "tiny", 16, FLOAT32),
        Size("token_stats", "tiny", 16, BFLOAT16, logits.SLICED),
        Size("logits_policy_loss", "tiny", 16, FLOAT32, logits.MASKED),
        Size("logits_policy_loss", "tiny", 128, BFLOAT16, logits.PACKED),
    ],
    "quick-cpu": [
        Size("token_logprobs", "qwen3-0.6b", 128, FLOAT32),
        Size("logits_policy_loss", "qwen3-0.6b", 128, FLOAT32),
        Size("logits_policy_loss", "qwen3-0.6b", 128, BFLOAT16),
    ],
}
SELECTIONS["quick-cuda"] = SELECTIONS["cpu"] = SELECTIONS["cuda"] = SELECTIONS["quick-cpu"]
