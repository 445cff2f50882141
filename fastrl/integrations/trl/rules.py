"""The options of TRL's trainers, and what `use_fastrl` does with each."""

from __future__ import annotations

from typing import Any

from fastrl import Objective
from fastrl.integrations.support import Support
from fastrl.integrations.trl_objective import LOSS_TYPES, trl_objective


def objective_of(trainer: Any) -> Objective:
    """Return the objective of a `GRPOTrainer` whose loss type is one of `LOSS_TYPES`.

    Raises:
        ValueError: an option has a value that no `Objective` has.
    """
    bonus = getattr(trainer, "_entropy_bonus_enabled", False)
    return trl_objective(
        trainer.loss_type,
        level=trainer.importance_sampling_level,
        epsilon_low=trainer.epsilon_low,
        epsilon_high=trainer.epsilon_high,
        delta=trainer.args.delta,
        sapo_temperature_pos=trainer.args.sapo_temperature_pos,
        sapo_temperature_neg=trainer.args.sapo_temperature_neg,
        beta=trainer.beta,
        bias_correction=getattr(trainer.args, "use_bias_correction_kl", False),
        max_completion_length=trainer.max_completion_length,
        entropy_coef=trainer.entropy_coef if bonus else 0.0,
    )


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
        note="Liger replaces the same methods; leave it out",
        applies=lambda t: bool(getattr(t.args, "use_liger_kernel", False)),
    ),
    Support(
        option="`torch_compile=True`",
        handling="refused",
        note="the compiled forward computes logits, which fastrl never does",
        applies=lambda t: bool(getattr(t.args, "torch_compile", False)),
    ),
    Support(
        option="DeepSpeed",
        handling="refused",
        note="sharded parameters have not been tried",
        applies=lambda t: bool(getattr(t, "is_deepspeed_enabled", False)),
    ),
    Support(
        option="FSDP",
        handling="refused",
        note="sharded parameters have not been tried",
        applies=lambda t: bool(getattr(t, "is_fsdp_enabled", False)),
    ),
    Support(
        option="tensor, context or sequence parallelism",
        handling="refused",
        note="the rows or the vocabulary of the head are spread over several devices",
        applies=_more_than_data_parallel,
    ),
    Support(
        option="several devices in one process (`device_map`, `n_gpu > 1`)",
        handling="refused",
        note="the backbone and the head must be on one device",
        applies=lambda t: _is_split(t) or getattr(t.args, "n_gpu", 1) > 1,
    ),
    Support(
        option="vision-language models",
        handling="refused",
        note="only TRL knows how to split their inputs into batches",
        applies=lambda t: bool(getattr(t, "_is_vlm", False)),
    ),
    Support(
        option="the auxiliary loss of a mixture of experts (`output_router_logits`)",
        handling="refused",
        note="fastrl does not see the router's logits",
        applies=lambda t: bool(getattr(t, "aux_loss_enabled", False)),
    ),
)

PRIMITIVE: tuple[Support, ...] = (
    Support(
        option="`RLOOTrainer`",
        handling="primitive",
        note="its ratio is a product over the sequence, known only after the last token",
        applies=_is_rloo,
    ),
    Support(
        option='`importance_sampling_level="sequence"` (GSPO)',
        handling="primitive",
        note="the ratio is known only after the last token, so one pass saves nothing",
        applies=lambda t: getattr(t, "importance_sampling_level", "token") != "token",
    ),
    Support(
        option='`loss_type="vespo"`, or one that is not in this table',
        handling="primitive",
        note="TRL computes the loss",
        applies=lambda t: getattr(t, "loss_type", None) not in LOSS_TYPES,
    ),
    Support(
        option="`delta` not above `1 + epsilon_high`, `epsilon > 1`, or a negative `beta`",
        handling="primitive",
        note="`Objective` allows no such value; TRL computes the loss",
        applies=_has_no_objective,
    ),
    Support(
        option="`off_policy_mask_threshold`",
        handling="primitive",
        note="the mask is known only after the last token",
        applies=lambda t: getattr(t, "off_policy_mask_threshold", None) is not None,
    ),
    Support(
        option="`top_entropy_quantile < 1`",
        handling="primitive",
        note="the quantile is known only after the last token",
        applies=lambda t: getattr(t, "top_entropy_quantile", 1.0) < 1.0,
    ),
    Support(
        option="`use_adaptive_entropy=True`",
        handling="primitive",
        note="TRL decides at each step whether the bonus applies",
        applies=lambda t: bool(getattr(t, "use_adaptive_entropy", False)),
    ),
    Support(
        option="tokens written by tools (`tool_mask`)",
        handling="primitive",
        note="decided for each batch",
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
        note="the correction applies to the policy term and not to the KL, as in TRL",
    ),
)

OTHERS: tuple[Support, ...] = (
    Support(
        option="a subclass, or a patched instance, with a `_compute_loss`, `compute_loss` or "
        "`_get_per_token_logps_and_entropies` that is not TRL's (`GMPOTrainer`, ...)",
        handling="refused",
        note="it would not be called",
    ),
    Support(
        option="`use_fastrl` a second time",
        handling="refused",
        note="undo the first one",
    ),
    Support(
        option="a head that `fastrl.integrations.transformers.lm_head` does not know (model type, "
        "quantised weight, DoRA, LoRA dropout on the head), or an adapter that needs its "
        "wrapper's forward (prompt learning, activated LoRA)",
        handling="refused",
        note="its logits could differ from the model's",
    ),
    Support(
        option="LoRA, `modules_to_save`, `cast_lm_head_to_fp32`, mixed precision, data parallel "
        "(DDP), evaluation",
        handling="fused",
        note="with the options above; TRL itself refuses LoRA on the head",
    ),
    Support(
        option="hooks on the causal language model, its PEFT wrapper or its LM head "
        "(`register_forward_hook`, ...)",
        handling="fused",
        note="they do not fire, and a warning says so; hooks on the backbone do",
    ),
    Support(
        option="inputs beside token ids and mask (`pixel_values`, `token_type_ids`, ...)",
        handling="unchanged",
        note="decided for each call",
    ),
)

SUPPORT: tuple[Support, ...] = (*FUSED, *PRIMITIVE, *REFUSED, *OTHERS)
