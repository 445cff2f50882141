"""The options of Liger's fused GRPO loss, and which of them fastrl supports."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.integrations.support import Support
from fastrl.integrations.trl_objective import LOSS_TYPES

SUPPORT = [
    Support(
        option='`loss_type` `"grpo"`, `"bnpo"`, `"dr_grpo"`, `"dapo"`, `"cispo"`, `"sapo"`',
        handling="fused",
        note="any `beta`, `epsilon_low`, `epsilon_high`, `delta`, `temperature`, `vllm_is_ratio`, "
        "`use_bias_correction_kl`, `num_items_in_batch`, bias",
    ),
    Support(
        option='`importance_sampling_level="sequence"`',
        handling="primitive",
        note="the ratio depends on the whole sequence, so there are two passes over the rows",
    ),
    Support(
        option='`loss_type="luspo"` with `importance_sampling_level="sequence"` and `beta=0`',
        handling="primitive",
    ),
    Support(
        option='`loss_type="luspo"` otherwise',
        handling="refused",
        note="Liger's loss also averages over padding",
    ),
    Support(
        option='`loss_type="vespo"`',
        handling="primitive",
        note="its weights depend on the whole sequence, so there are two passes over the rows",
    ),
    Support(
        option='`vllm_is_ratio` with `loss_type="vespo"`, of shape `[B]` or `[B, 1]`, or without '
        "`old_per_token_logps`",
        handling="refused",
        note="each token's ratio enters the weight of its sequence",
    ),
    Support(
        option='`importance_sampling_level="sequence"` with `"cispo"`, `"sapo"` or `"vespo"`',
        handling="refused",
        note="Liger's error, but raised in the constructor",
    ),
    Support(
        option="`delta` not above `1 + epsilon_high`",
        handling="refused",
        note="`Objective` allows no such bound",
    ),
    Support(
        option="`ref_per_token_logps` and `ref_input` together",
        handling="fused",
        note="the first is used, with a warning, as in Liger; with `beta=0` neither is needed",
    ),
    Support(
        option="`compiled`, `chunk_size`",
        handling="fused",
        note="accepted and ignored: nothing is compiled, and fastrl chooses the chunks",
    ),
]


def refuse(loss_type: str, level: str, beta: float, max_completion_length: int | None) -> None:
    """Raise for options that Liger refuses, with its message if any, and that fastrl lacks."""
    if level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
        raise ValueError(
            f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}: "
            "importance_sampling_level must be 'token', got 'sequence'"
        )
    names = (*LOSS_TYPES, "vespo")
    if loss_type not in names:
        raise ValueError(f"loss_type must be one of {', '.join(names)}; got {loss_type!r}")
    if level not in ("token", "sequence"):
        raise ValueError(f"importance_sampling_level must be token or sequence, got {level!r}")
    if loss_type == "luspo" and (level == "token" or beta):
        raise NotImplementedError(
            "loss_type luspo needs importance_sampling_level sequence and beta 0: otherwise "
            f"Liger averages over padding; got {level} and {beta}"
        )
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ValueError("max_completion_length is needed with loss_type dr_grpo, got None")


def tokens_of_rank(mask: Tensor, count: float | Tensor | None) -> Tensor:
    """Return the tokens of the batch divided by the number of ranks; `count` is of all ranks."""
    ranks, several = 1, torch.distributed.is_available() and torch.distributed.is_initialized()
    if several:
        ranks = torch.distributed.get_world_size()
    if count is None:
        tokens = mask.sum(dtype=torch.float32)
        if several:
            torch.distributed.all_reduce(tokens)
    else:
        tokens = torch.as_tensor(count, dtype=torch.float32, device=mask.device)
    return (tokens / ranks).clamp(min=1.0)
