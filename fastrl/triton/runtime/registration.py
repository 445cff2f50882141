"""The operators of `fastrl_triton`; each imports Triton and its kernels at its first call.

The key CPU serves the tests, which compile the kernels for a GPU and execute that code on a CPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch

from fastrl.library import NAMESPACES

#: The module with the functions X, X_, X_fwd, X_bwd, X_fwd_ and X_bwd_, by X; relative to this one,
#: since the package on the Hub has another name.
MODULES = {
    "token_stats": "..vocabulary.token_stats",
    "divergence": "..vocabulary.divergence",
    "logits_policy_loss": "..vocabulary.logits_policy_loss",
    "policy_loss": "..tokens.policy_loss",
    "gae": "..gae.gae",
    "group_advantages": "..groups.group_advantages",
    "sequence_weights": "..tokens.sequence_weights",
    "scale": "..scale",
    **dict.fromkeys(("gathered_dots", "gathered_sums", "scattered_sums"), "..vocabulary.gathered"),
}
OPERATORS = (
    "token_stats_fwd",
    "token_stats_bwd",
    "token_stats_bwd_",
    "divergence_fwd",
    "divergence_bwd",
    "divergence_bwd_",
    "logits_policy_loss_fwd",
    "logits_policy_loss_fwd_",
    "policy_loss_fwd",
    "gae_fwd",
    "group_advantages_fwd",
    "sequence_weights",
    "scale_",
    "gathered_dots_",
    "gathered_sums_",
    "scattered_sums_",
)

_INSTALLED = importlib.util.find_spec("triton") is not None


def missing() -> str | None:
    """Return in one sentence why the Triton kernels cannot run here, or None."""
    if not _INSTALLED:
        return "triton is not installed (`pip install triton`)"
    if not torch.cuda.is_available():
        return "there is no GPU that torch can use"
    return None


def _imported_at_first_call(name: str) -> Callable[..., Any]:
    @functools.cache
    def implementation() -> Callable[..., Any]:
        module = importlib.import_module(MODULES[re.sub(r"(_fwd|_bwd)?_?$", "", name)], __package__)
        return cast("Callable[..., Any]", getattr(module, name))

    def run(first: torch.Tensor, *arguments: Any) -> Any:
        # Triton launches on the current device, whatever the device of the tensors is
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            return implementation()(first, *arguments)

    return run


for _name in OPERATORS:
    _run = _imported_at_first_call(_name)
    for _key in ("CUDA", "CPU"):
        torch.library.impl(f"{NAMESPACES['triton']}::{_name}", _key, _run)
