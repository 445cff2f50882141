"""What TRL's trainers can be asked for, and what `use_fastrl` does with it."""

from __future__ import annotations

from typing import Any

from fastrl import Objective
from fastrl.integrations.support import Support

#: loss_type -> (ratio, aggregation); the constants of the denominators are in `trl_loss`.
LOSS_TYPES: dict[str, tuple[str, str]] = {
    "grpo": ("ppo_clip", "seq-mean-token-mean"),
    "bnpo": ("ppo_clip", "token-mean"),
    "dr_grpo": ("ppo_clip", "token-mean"),
    "dapo": ("ppo_clip", "token-mean"),
    "luspo": ("ppo_clip", "token-mean"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
}


def objective_of(trainer: Any) -> Objective:
    """Return the objective of a `GRPOTrainer` whose loss type is one of `LOSS_TYPES`.

    Raises:
        ValueError: an option has a value that no `Objective` has.
    """
    ratio, aggregation = LOSS_TYPES[trainer.loss_type]
    options: dict[str, Any] = {
        "surrogate": ratio,
        "aggregation": aggregation,
        "kl_coef": trainer.beta,
    }
    if trainer.beta and getattr(trainer.args, "use_bias_correction_kl", False):
        options["kl_gradient"] = "bias-corrected"
    if getattr(trainer, "_entropy_bonus_enabled", False) and trainer.entropy_coef:
        options |= {"entropy_coef": trainer.entropy_coef, "entropy_aggregation": "token-mean"}
    if ratio == "ppo_clip":
        options |= {"clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high}
        options["delta"] = trainer.args.delta
    elif ratio == "cispo":
        # TRL caps the ratio itself, from above alone; its log-probability keeps its gradient
        options |= {"clip_low": 1.0, "clip_high": trainer.epsilon_high - 1.0}
    else:
        options["sapo_temperature_pos"] = trainer.args.sapo_temperature_pos
        options["sapo_temperature_neg"] = trainer.args.sapo_temperature_neg
    return Objective(**options)


def _has_no_objective(trainer: Any) -> bool:
    if getattr(trainer, "loss_type", None) not in LOSS_TYPES:
        return False
    try:
        objective_of(trainer)
    except ValueError:
        return True
    return False


def _is_rloo(trainer: Any) -> bool:
    return any(base.__name__ == "RLOOTrainer" for base in type(trainer).__mro__)


def _more_than_data_parallel(trainer: Any) -> bool:
    layout = getattr(trainer.accelerator, "parallelism_config", None)
    kinds = ("tp_enabled", "cp_enabled", "sp_enabled")
    return layout is not None and any(getattr(layout, kind, False) for kind in kinds)


def _is_split(trainer: Any) -> bool:
    places = getattr(trainer.model, "hf_device_map", None) or {}
    return len(set(places.values())) > 1


REFUSED: tuple[Support, ...] = (
    Support(
        option="`use_liger_kernel=True`",
        handling="refused",
        note="liger replaces the same pieces; leave it out",
        applies=lambda t: bool(getattr(t.args, "use_liger_kernel", False)),
    ),
    Support(
        option="`torch_compile=True`",
        handling="refused",
        note="the compiled forward ends in logits, which are never made here",
        applies=lambda t: bool(getattr(t.args, "torch_compile", False)),
    ),
    Support(
        option="DeepSpeed",
        handling="refused",
        note="its sharded parameters have not been tried",
        applies=lambda t: bool(getattr(t, "is_deepspeed_enabled", False)),
    ),
    Support(
        option="FSDP",
        handling="refused",
        note="its sharded parameters have not been tried",
        applies=lambda t: bool(getattr(t, "is_fsdp_enabled", False)),
    ),
    Support(
        option="tensor, context or sequence parallelism",
        handling="refused",
        note="the rows or the vocabulary of the head are then on several devices",
        applies=_more_than_data_parallel,
    ),
    Support(
        option="several devices in one process (`device_map`, `n_gpu > 1`)",
        handling="refused",
        note="the backbone and the head have to be on one device",
        applies=lambda t: _is_split(t) or getattr(t.args, "n_gpu", 1) > 1,
    ),
    Support(
        option="vision-language models",
        handling="refused",
        note="how their inputs are cut into batches is TRL's own",
        applies=lambda t: bool(getattr(t, "_is_vlm", False)),
    ),
    Support(
        option="the auxiliary loss of a mixture of experts (`output_router_logits`)",
        handling="refused",
        note="the router's logits are not read here",
        applies=lambda t: bool(getattr(t, "aux_loss_enabled", False)),
    ),
)

PRIMITIVE: tuple[Support, ...] = (
    Support(
        option="`RLOOTrainer`",
        handling="primitive",
        note="its ratio is the product over the sequence, known only after all tokens",
        applies=_is_rloo,
    ),
    Support(
        option='`importance_sampling_level="sequence"` (GSPO)',
        handling="primitive",
        note="the ratio is known only after all tokens, so one pass saves nothing",
        applies=lambda t: getattr(t, "importance_sampling_level", "token") != "token",
    ),
    Support(
        option='`loss_type="vespo"`, or one that is not in this table',
        handling="primitive",
        note="TRL computes it",
        applies=lambda t: getattr(t, "loss_type", None) not in LOSS_TYPES,
    ),
    Support(
        option="`delta` not above `1 + epsilon_high`, `epsilon > 1`, or a negative `beta`",
        handling="primitive",
        note="no `Objective` has such a value; TRL computes it",
        applies=_has_no_objective,
    ),
    Support(
        option="`off_policy_mask_threshold`",
        handling="primitive",
        note="the mask is known only after all tokens",
        applies=lambda t: getattr(t, "off_policy_mask_threshold", None) is not None,
    ),
    Support(
        option="`top_entropy_quantile < 1`",
        handling="primitive",
        note="the quantile is known only after all tokens",
        applies=lambda t: getattr(t, "top_entropy_quantile", 1.0) < 1.0,
    ),
    Support(
        option="`use_adaptive_entropy=True`",
        handling="primitive",
        note="whether the bonus acts is TRL's own affair",
        applies=lambda t: bool(getattr(t, "use_adaptive_entropy", False)),
    ),
    Support(
        option="tokens written by tools (`tool_mask`)",
        handling="primitive",
        note="decided batch by batch",
    ),
)

FUSED: tuple[Support, ...] = (
    Support(
        option="`GRPOTrainer`, " + ", ".join(f'`"{name}"`' for name in LOSS_TYPES),
        handling="fused",
        note="token level, any `beta`, `epsilon`, `epsilon_high`, accumulation, `num_iterations`",
    ),
    Support(
        option="`delta`, `use_bias_correction_kl`, `entropy_coef`, `temperature`, "
        "`scale_rewards`, `mask_truncated_completions`",
        handling="fused",
    ),
    Support(
        option="`use_vllm`, every `vllm_importance_sampling_mode`",
        handling="fused",
        note="the correction weighs the policy and not the KL, as in TRL",
    ),
)

SEAMS: tuple[Support, ...] = (
    Support(
        option="a subclass, or a patched instance, with a `_compute_loss`, `compute_loss` or "
        "`_get_per_token_logps_and_entropies` of its own (`GMPOTrainer`, ...)",
        handling="refused",
        note="it would not be called",
    ),
    Support(
        option="`use_fastrl` a second time",
        handling="refused",
        note="undo the first",
    ),
    Support(
        option="a head that `fastrl.integrations.transformers.lm_head` does not know (model type, "
        "quantised weight, DoRA, LoRA dropout on the head), or an adapter whose wrapper acts "
        "(prompt learning, activated LoRA)",
        handling="refused",
        note="nothing is guessed about the logits",
    ),
    Support(
        option="LoRA, `modules_to_save`, `cast_lm_head_to_fp32`, mixed precision, data parallel "
        "(DDP), evaluation",
        handling="fused",
        note="as the options above allow; LoRA on the head itself TRL refuses",
    ),
    Support(
        option="hooks on the causal language model, its PEFT wrapper or its LM head "
        "(`register_forward_hook`, ...)",
        handling="fused",
        note="they do not see these calls, and a warning says so; those of the backbone fire",
    ),
    Support(
        option="inputs beside token ids and mask (`pixel_values`, `token_type_ids`, ...)",
        handling="own",
        note="decided call by call",
    ),
)

SUPPORT: tuple[Support, ...] = (*FUSED, *PRIMITIVE, *REFUSED, *SEAMS)
