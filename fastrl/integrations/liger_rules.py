"""What Liger's fused GRPO loss can be asked for, and what fastrl does with it."""

from __future__ import annotations

from typing import Any

from fastrl.integrations.support import Support

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
        note="the ratio is known only after all tokens: the rows are visited twice",
    ),
    Support(
        option='`loss_type="luspo"` with `importance_sampling_level="sequence"` and `beta=0`',
        handling="primitive",
    ),
    Support(
        option='`loss_type="luspo"` otherwise',
        handling="refused",
        note="Liger's own averages over padding, too",
    ),
    Support(
        option='`loss_type="vespo"`',
        handling="refused",
        note="its weights are of whole sequences under the current policy",
    ),
    Support(
        option='`importance_sampling_level="sequence"` with `"cispo"`, `"sapo"` or `"vespo"`',
        handling="refused",
        note="as in Liger, in its words, but by the constructor",
    ),
    Support(
        option="`delta` not above `1 + epsilon_high`",
        handling="refused",
        note="no `Objective` has such a bound",
    ),
    Support(
        option="`ref_per_token_logps` and `ref_input` together",
        handling="fused",
        note="the former is taken, with a warning, as in Liger; with `beta=0` neither is needed",
    ),
    Support(
        option="`compiled`, `chunk_size`",
        handling="fused",
        note="taken, and without effect: nothing is compiled, fastrl cuts its own chunks",
    ),
]

#: loss_type -> how its tokens are added up, as fields of `Objective`.
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "seq-mean-token-mean", "count_empty": True},
    "bnpo": {"aggregation": "token-mean"},
    "dr_grpo": {"aggregation": "seq-mean-token-sum-norm", "count_empty": True},
    "dapo": {"aggregation": "token-mean"},
    "cispo": {"aggregation": "token-mean"},
    "sapo": {"aggregation": "seq-mean-token-mean", "count_empty": True},
    "luspo": {"aggregation": "seq-mean-token-sum", "count_empty": True},
}


def refuse(loss_type: str, level: str, beta: float, max_completion_length: int | None) -> None:
    """Raise for what Liger refuses, in its words where it has some, and for what fastrl has not."""
    if level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
        raise ValueError(
            f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}: "
            "importance_sampling_level must be 'token', got 'sequence'"
        )
    if loss_type == "vespo":
        raise NotImplementedError(
            f"loss_type must be one of {', '.join(AGGREGATIONS)}; vespo weighs whole sequences "
            "under the current policy, which fastrl does not have"
        )
    if loss_type not in AGGREGATIONS:
        raise ValueError(f"loss_type must be one of {', '.join(AGGREGATIONS)}; got {loss_type!r}")
    if level not in ("token", "sequence"):
        raise ValueError(f"importance_sampling_level must be token or sequence, got {level!r}")
    if loss_type == "luspo" and (level == "token" or beta):
        raise NotImplementedError(
            "loss_type luspo needs importance_sampling_level sequence and beta 0: otherwise "
            f"Liger's average takes in padding; got {level} and {beta}"
        )
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ValueError("max_completion_length is needed with loss_type dr_grpo, got None")
