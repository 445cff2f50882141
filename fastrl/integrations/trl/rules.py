"""The options of TRL's trainers, and the behavior of `use_fastrl` for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fastrl import Objective
from fastrl.integrations.formulas import LOSS_TYPES, trl_objective
from fastrl.integrations.support import Support
from fastrl.integrations.trl.vllm_replay import lacks_sets


def objective_of(trainer: Any) -> Objective:
    """Return the objective of an `RLOOTrainer`, or of a `GRPOTrainer` with one of `LOSS_TYPES`.

    RLOO clips the ratio of a whole sequence: its log-ratio is the sum over the tokens.

    Raises:
        ValueError: an option has a value that no `Objective` has.
    """
    if is_rloo(trainer):
        return Objective(clip_low=trainer.epsilon_low, clip_high=trainer.epsilon_high)
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
        entropy_coef=_entropy_coef(trainer),
        off_policy_threshold=getattr(trainer, "off_policy_mask_threshold", None),
        top_entropy_quantile=getattr(trainer, "top_entropy_quantile", 1.0),
    )


def _entropy_coef(trainer: Any) -> float:
    """Return the weight of the entropy bonus in this step."""
    if not getattr(trainer, "_entropy_bonus_enabled", False):
        return 0.0
    adaptive = getattr(trainer, "use_adaptive_entropy", False)
    if adaptive and trainer._last_world_entropy > trainer.args.entropy_target:
        return 0.0
    coefficient: float = trainer.entropy_coef
    return coefficient


def refuse(trainer: Any, *rules: Support) -> None:
    """Raise if one of the rules applies to a trainer."""
    for rule in rules:
        if rule.applies is not None and rule.applies(trainer):
            raise ValueError(f"use_fastrl does not support {rule.option}: {rule.note}")


def why_no_objective(
    trainer: Any, objective: Callable[[Any], Objective] = objective_of
) -> str | None:
    """Return why a trainer's options make no objective, by TRL's names, or None."""
    if _has_another_loss_type(trainer):
        return None
    try:
        objective(trainer)
    except ValueError as error:
        cispo = not is_rloo(trainer) and trainer.loss_type == "cispo"
        upper = "epsilon_high - 1" if cispo else "epsilon_high"
        names = {"clip_low": "epsilon", "clip_high": upper, "kl_coef": "beta"}
        names |= {"level": "importance_sampling_level"} if str(error).startswith("level") else {}
        return re.sub("|".join(names), lambda name: names[name[0]], str(error))
    return None


def _has_another_loss_type(trainer: Any) -> bool:
    return not is_rloo(trainer) and getattr(trainer, "loss_type", None) not in LOSS_TYPES


def _has_own_loss(trainer: Any) -> bool:
    from trl import GRPOTrainer, RLOOTrainer

    base = RLOOTrainer if is_rloo(trainer) else GRPOTrainer
    return any(
        name in trainer.__dict__ or getattr(type(trainer), name) is not getattr(base, name)
        for name in ("_compute_loss", "compute_loss")
    )


def _needs_the_quantile(trainer: Any) -> bool:
    if getattr(trainer, "top_entropy_quantile", 1.0) >= 1.0:
        return False
    bonus = getattr(trainer, "_entropy_bonus_enabled", False)
    return bonus or trainer.accelerator.num_processes > 1


def is_rloo(trainer: Any) -> bool:
    """Return whether a trainer is an `RLOOTrainer`."""
    return any(base.__name__ == "RLOOTrainer" for base in type(trainer).__mro__)


def _more_than_data_parallel(trainer: Any) -> bool:
    layout = getattr(trainer.accelerator, "parallelism_config", None)
    kinds = ("tp_enabled", "cp_enabled", "sp_enabled")
    return layout is not None and any(getattr(layout, kind, False) for kind in kinds)


def _is_split(trainer: Any) -> bool:
    models = (getattr(trainer, name, None) for name in ("model", "ref_model", "teacher_model"))
    places = (getattr(model, "hf_device_map", None) or {} for model in models)
    return any(len(set(found.values())) > 1 for found in places)


REFUSED: tuple[Support, ...] = (
    Support(
        option="tensor, context or sequence parallelism",
        handling="refused",
        note="the rows or the vocabulary of the head are spread over several devices, and a loss "
        "would have to run across them. FSDP2 and DDP are supported",
        applies=_more_than_data_parallel,
    ),
    Support(
        option="several devices in one process (`device_map`, `n_gpu > 1`)",
        handling="refused",
        note="backbone and head must be on one device: start one process per device "
        "(`accelerate launch`), with FSDP2 or DDP",
        applies=lambda t: _is_split(t) or getattr(t.args, "n_gpu", 1) > 1,
    ),
)

_RECORDED = "`replay_kept_tokens=True` or `score_centering=K` with "

#: Rules for what records the sampler.
NOT_REPLAYED: tuple[Support, ...] = (
    Support(
        option=_RECORDED + '`vllm_mode="server"`',
        handling="refused",
        note="TRL asks `/v1/completions`, which does not return the tokens that vLLM kept. It "
        "would have to ask `/inference/v1/generate` of a server with `--return-sampling-mask`",
        applies=lambda t: t.use_vllm and t.vllm_mode == "server",
    ),
    Support(
        option=_RECORDED + "`vllm_tensor_parallel_size > 1`",
        handling="refused",
        note="TRL generates the completions of several ranks at once",
        applies=lambda t: t.use_vllm and t.vllm_tensor_parallel_size > 1,
    ),
    Support(
        option=_RECORDED + "`use_transformers_continuous_batching`",
        handling="refused",
        note="its logits belong to whichever sequences are running, and `generate_batch` does not "
        "return the tokens that each sequence kept",
        applies=lambda t: t.use_transformers_continuous_batching,
    ),
    Support(
        option=_RECORDED + "`rollout_func`, tools or environments",
        handling="refused",
        note="their completions do not come from a single generation",
        applies=lambda t: (
            getattr(t, "rollout_func", None) is not None
            or bool(getattr(t, "tools", None))
            or getattr(t, "environment_factories", None) is not None
        ),
    ),
    Support(
        option=_RECORDED + "prompt or prefix tuning (`peft`)",
        handling="refused",
        note="TRL's log-probabilities differ from the sampler's even over the whole vocabulary",
        applies=lambda t: getattr(
            getattr(t.model, "active_peft_config", None), "is_prompt_learning", False
        ),
    ),
)

WITHOUT_SETS = Support(
    option="`replay_kept_tokens=True` with a vLLM engine that does not return the tokens it kept",
    handling="refused",
    note="make the trainer in a block: `with vllm_returns_kept_tokens(): trainer = "
    "GRPOTrainer(...)`. This function of `fastrl.integrations.trl` starts vLLM with "
    "`return_sampling_mask=True`",
    applies=lambda t: t.use_vllm and lacks_sets(t),
)

OWN_LOSS = Support(
    option="a subclass, or a patched instance, with a `_compute_loss` or `compute_loss` that is "
    "not TRL's (`GMPOTrainer`, ...)",
    handling="primitive",
    note="the trainer computes its own loss",
    applies=_has_own_loss,
    reason=lambda t: f"this {type(t).__name__} computes a loss of its own",
)

#: Rules that are checked at each call, as callbacks may change the options of a trainer.
PRIMITIVE: tuple[Support, ...] = (
    Support(
        option='`loss_type="vespo"`, or a `loss_type` that is not in this table',
        handling="primitive",
        note="TRL computes the loss",
        applies=_has_another_loss_type,
        reason=lambda t: f"no Objective is loss_type={t.loss_type!r}, so TRL computes the loss",
    ),
    Support(
        option="a value that `Objective` does not allow: `delta` not above `1 + epsilon_high`, "
        "`epsilon > 1`, a negative `beta`, `top_entropy_quantile=0`",
        handling="primitive",
        note="TRL computes the loss",
        applies=lambda t: why_no_objective(t) is not None,
        reason=lambda t: f"{why_no_objective(t)}, so TRL computes the loss",
    ),
    Support(
        option="`top_entropy_quantile < 1` with an entropy bonus or on several ranks",
        handling="primitive",
        note="TRL takes the quantile over all ranks, and averages the bonus over the tokens above "
        "it",
        applies=_needs_the_quantile,
        reason=lambda t: (
            f"top_entropy_quantile={t.top_entropy_quantile} with an entropy bonus or "
            "on several ranks is a quantile over all ranks, so TRL computes the loss"
        ),
    ),
)

FUSED: tuple[Support, ...] = (
    Support(
        option="`GRPOTrainer`, " + ", ".join(f'`"{name}"`' for name in LOSS_TYPES),
        handling="fused",
        note="any `beta`, `epsilon`, `epsilon_high`, accumulation, `num_iterations`",
    ),
    Support(
        option="`delta`, `use_bias_correction_kl`, `entropy_coef`, `use_adaptive_entropy`, "
        "`temperature`, `scale_rewards`, `mask_truncated_completions`, tokens written by tools",
        handling="fused",
    ),
    Support(
        option='`RLOOTrainer`, `importance_sampling_level="sequence"` (GSPO), '
        "`off_policy_mask_threshold`, `top_entropy_quantile`",
        handling="fused",
        note="two passes over the rows in the same memory, because gradients depend on values that "
        "are known only after the last token",
    ),
    Support(
        option="`top_p`, `top_k`, `min_p` and generation by `transformers` or a colocated vLLM, "
        "with `use_fastrl(trainer, replay_kept_tokens=True)`",
        handling="fused",
        note="log-probabilities are the sampler's, over the tokens that it kept. Without this "
        "option they are over the whole vocabulary, as in TRL, and a warning says so",
    ),
    Support(
        option="`use_vllm`, every `vllm_importance_sampling_mode`",
        handling="fused",
        note="the correction applies to the policy term and not to the KL, as in TRL",
    ),
)

OTHERS: tuple[Support, ...] = (
    Support(
        option="FSDP2, FSDP1, DeepSpeed ZeRO-1, 2 and 3, DDP",
        handling="fused",
        note="fastrl runs inside the forward of the wrappers and of the head, where the head is "
        "whole",
    ),
    Support(
        option="`torch_compile=True`",
        handling="fused",
        note="only the backbone is compiled, on the padded batch unless `packed=True`",
    ),
    Support(
        option="padded micro-batches, of all trainers but `CPOTrainer`, `ORPOTrainer` and "
        "`OnlineDPOTrainer`",
        handling="fused",
        note="the model runs on [rows without padding](replace-the-loss/trl.md#packed-rows), if a "
        "trial shows that it can",
    ),
    Support(
        option="`packed=True` with `eager` attention, recurrent or chunked layers, dropout in the "
        "attention, or hooks on parts of the backbone; `packed_tokens` on several ranks",
        handling="refused",
        note="rows of several sequences would have other values, or ranks other numbers of rows. "
        "Hooks that come later, as NEFTune's, and inputs with images, virtual tokens or positions "
        "raise the error in the step that has them",
    ),
    Support(
        option="the auxiliary loss of a mixture of experts, images and other inputs of a "
        "vision-language model",
        handling="fused",
        note="they reach the model as in TRL",
    ),
    Support(
        option="LoRA and other adapters, `modules_to_save`, `cast_lm_head_to_fp32`, mixed "
        "precision, evaluation, `use_liger_kernel`",
        handling="fused",
        note="TRL itself refuses LoRA on the head, and no longer uses Liger's loss. Under FSDP2, "
        "fastrl averages the gradient of a trainable copy of the head over ranks, and TRL does "
        "not: [what differs](replace-the-loss/trl.md#what-differs-from-trl)",
    ),
    Support(
        option="a `_get_per_token_logps_and_entropies` that is not TRL's",
        handling="refused",
        note="your method would not be called",
    ),
    Support(
        option="TRL before 1.15",
        handling="refused",
        note="its models have no `fused_lm_head`",
    ),
    Support(
        option="other trainers (`RewardTrainer`, ...)",
        handling="refused",
        note="the error names the function of fastrl that fits their loss, if there is one",
    ),
    Support(
        option="`use_fastrl` a second time",
        handling="refused",
        note="undo the first one",
    ),
    Support(
        option="a head that is not an `nn.Linear` (quantized), or a model whose logits differ from "
        "those of `fastrl.integrations.transformers.lm_head`",
        handling="refused",
        note="a few rows are compared before the first step. `fastrl.logits_policy_loss` takes the "
        "logits of any model",
    ),
    Support(
        option="`replay_kept_tokens=True` with an option that changes the logits of kept tokens "
        "(`repetition_penalty`, ...) or another temperature in `generation_kwargs`; this or "
        "`score_centering=K` with beams or greedy search",
        handling="refused",
        note="the first generation raises the error; with vLLM, `use_fastrl`",
    ),
    Support(
        option="hooks on the LM head (`register_forward_hook`, ...)",
        handling="fused",
        note="they do not fire, as in TRL, and a warning says so",
    ),
    Support(
        option="a batch with inputs that neither TRL's loss nor its models have today",
        handling="primitive",
        note="the choice is made for each batch",
    ),
)

SUPPORT: tuple[Support, ...] = (
    *FUSED,
    OWN_LOSS,
    *PRIMITIVE,
    *REFUSED,
    *NOT_REPLAYED,
    WITHOUT_SETS,
    *OTHERS,
)


def why_not_fused(trainer: Any, rules: tuple[Support, ...] = PRIMITIVE) -> str | None:
    """Return the first rule that leaves the loss to TRL, as a sentence, or None."""
    found = (rule.reason for rule in rules if rule.applies is not None and rule.applies(trainer))
    return next((reason(trainer) for reason in found if reason is not None), None)
