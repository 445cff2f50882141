"""The options of TRL, verl, OpenRLHF and Liger, their defaults, and what we have in their place."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import fastrl
from fastrl import Objective
from fastrl.integrations import liger, openrlhf, verl
from fastrl.objective.presets import ADVANTAGE_CONVENTIONS
from fastrl.ops.group_advantages import group_advantages
from tests.integrations import liger_formulas, openrlhf_formulas
from tests.integrations.verl import formulas


class Ours(NamedTuple):
    """What we have in the place of an option: its name, and a function that looks it up."""

    name: str
    read: Callable[[], object]
    presets: str = ""


class Row(NamedTuple):
    option: str
    default: object
    ours: Ours | None = None  # None: there is no default here, the caller passes it
    meaning: object = ...  # their default as a value of ours, where it is written otherwise
    differs: object = ...  # our default, where it is another; docs/conventions.md names the option


class Source(NamedTuple):
    """A class with fields, a function or a class with `__init__`, or a parser, and its defaults."""

    package: str
    version: str
    file: str
    name: str
    rows: list[Row]
    others: str = ""  # patterns of the other options: known, not of a loss that we have


def presets(convention: str, field: str, names: str) -> Ours:
    """A field of presets, which should be the same in all of them."""

    def read() -> object:
        found = {getattr(Objective.preset(x, convention=convention), field) for x in names.split()}
        if field == "kl_coef" and found == {None}:
            return 0.0  # no KL, as with their 0
        return found.pop() if len(found) == 1 else found

    return Ours(f"{field} of {names}", read, names)


def weights(field: str) -> Ours:
    preset = Objective.preset("vespo", convention="trl")
    return Ours(f"GammaWeights.{field} of vespo", lambda: getattr(preset.gamma_weights, field))


def argument(function: Callable[..., Any], name: str) -> Ours:
    parameter = inspect.signature(function).parameters[name]
    return Ours(f"{function.__qualname__}({name})", lambda: parameter.default)


def defaults(theirs: Callable[..., Any]) -> dict[str, object]:
    """The defaults of a transcription, which are the trainer's."""
    found = inspect.signature(theirs).parameters.values()
    return {x.name: x.default for x in found if x.default is not inspect.Parameter.empty}


def signature(function: Callable[..., Any], **theirs: object) -> list[Row]:
    """The rows of a drop-in, which has their names."""
    return [Row(name, default, argument(function, name)) for name, default in theirs.items()]


CLIPPED, KLS = "bnpo dapo grpo dr_grpo", "bnpo dapo grpo dr_grpo gspo sapo luspo cispo vespo"
OF_TRL = "trainer/grpo_config.py"
TRL = [
    Row("epsilon", 0.2, presets("trl", "clip_low", CLIPPED)),
    Row("epsilon", 0.2, presets("trl", "clip_low", "gspo luspo"), differs=3e-4),
    Row("epsilon_high", None, presets("trl", "clip_high", CLIPPED), 0.2),
    Row("epsilon_high", None, presets("trl", "clip_high", "gspo luspo"), 0.2, 4e-4),
    Row("epsilon_high", None, presets("trl", "clip_high", "cispo"), 0.2 - 1, 5.0 - 1),
    Row("delta", None, presets("trl", "delta", CLIPPED)),
    Row("beta", 0.0, presets("trl", "kl_coef", KLS)),
    Row("use_bias_correction_kl", True, presets("trl", "kl_gradient", KLS), "bias-corrected"),
    Row("sapo_temperature_pos", 1.0, presets("trl", "sapo_temperature_pos", "sapo")),
    Row("sapo_temperature_neg", 1.05, presets("trl", "sapo_temperature_neg", "sapo")),
    Row("vespo_k_pos", 2.0, weights("k_pos")),
    Row("vespo_lambda_pos", 3.0, weights("lambda_pos")),
    Row("vespo_k_neg", 3.0, weights("k_neg")),
    Row("vespo_lambda_neg", 2.0, weights("lambda_neg")),
    Row("importance_sampling_level", "token", presets("trl", "level", f"{CLIPPED} sapo cispo")),
    Row("entropy_coef", 0.0, presets("trl", "entropy_coef", KLS)),
    Row("top_entropy_quantile", 1.0, presets("trl", "top_entropy_quantile", KLS)),
    Row("off_policy_mask_threshold", None, presets("trl", "off_policy_threshold", KLS)),
    Row("scale_rewards", "group", argument(group_advantages, "scale")),
    Row("temperature", 1.0, argument(fastrl.linear_policy_loss, "temperature")),
    Row("loss_type", "dapo"),
    Row("max_completion_length", 512),
    Row("vllm_importance_sampling_correction", True),
    Row("vllm_importance_sampling_mode", "sequence_mask"),
    Row("vllm_importance_sampling_clip_max", 3.0),
    Row("vllm_importance_sampling_clip_min", None),
    Row("multi_objective_aggregation", "sum_then_normalize"),
    Row("mask_truncated_completions", False),
    Row("use_adaptive_entropy", False),
]
TRL_GMPO = [
    Row("epsilon", 0.4, presets("trl", "clip_low", "gmpo")),
    Row("epsilon", 0.4, presets("trl", "clip_high", "gmpo")),  # epsilon_high is None
]
TRL_RLOO = [
    Row("epsilon", 0.2),
    Row("epsilon_high", None),
    Row("beta", 0.05),
    Row("normalize_advantages", False),
    Row("reward_clip_range", None),
]

ALL = "ppo grpo dr_grpo dapo cispo gspo sapo gmpo reinforce dppo_tv dppo_kl"
BOUNDED, BY_TOKEN = "ppo grpo dr_grpo cispo", "ppo grpo dapo cispo reinforce dppo_tv dppo_kl"
VERL_ACTOR = [
    Row("clip_ratio", 0.2, presets("verl", "clip_low", f"{BOUNDED} dapo")),
    Row("clip_ratio_low", 0.2, presets("verl", "clip_low", f"{BOUNDED} dapo")),
    Row("clip_ratio_low", 0.2, presets("verl", "clip_low", "gspo"), differs=3e-4),
    Row("clip_ratio_low", 0.2, presets("verl", "clip_low", "gmpo"), differs=0.4),
    Row("clip_ratio_high", 0.2, presets("verl", "clip_high", BOUNDED)),
    Row("clip_ratio_high", 0.2, presets("verl", "clip_high", "dapo"), differs=0.28),
    Row("clip_ratio_high", 0.2, presets("verl", "clip_high", "gspo"), differs=4e-4),
    Row("clip_ratio_high", 0.2, presets("verl", "clip_high", "gmpo"), differs=0.4),
    Row("clip_ratio_c", 3.0, presets("verl", "dual_clip", "ppo grpo dr_grpo dapo")),
    Row("clip_ratio_c", 3.0, presets("verl", "clip_high", "dppo_tv dppo_kl"), 3.0 - 1, 20.0 - 1),
    Row("loss_agg_mode", "token-mean", presets("verl", "aggregation", BY_TOKEN)),
    Row(
        "loss_agg_mode",
        "token-mean",
        presets("verl", "aggregation", "gspo"),
        differs="seq-mean-token-mean",
    ),
    Row("loss_agg_mode", "token-mean", presets("verl", "kl_aggregation", "gspo sapo gmpo")),
    Row("loss_scale_factor", None, presets("verl", "length_norm", "dr_grpo")),
    Row("entropy_coeff", 0, presets("verl", "entropy_coef", ALL)),
    Row("tau_pos", 1.0, presets("verl", "sapo_temperature_pos", "sapo")),
    Row("tau_neg", 1.05, presets("verl", "sapo_temperature_neg", "sapo")),
    Row("use_kl_loss", False, presets("verl", "kl_coef", ALL), 0.0),
    Row("kl_loss_type", "low_var_kl", presets("verl", "kl_estimator", ALL), "k3"),
    Row("kl_loss_coef", 0.001),
]
VERL_POLICY = [
    Row("loss_mode", "vanilla"),
    Row("clip_cov_ratio", 0.0002),
    Row("clip_cov_lb", 1.0),
    Row("clip_cov_ub", 5.0),
    Row("kl_cov_ratio", 0.0002),
    Row("ppo_kl_coef", 0.1),
    Row("dro_beta", None),
]
VERL_ALGORITHM = [
    Row("norm_adv_by_std_in_grpo", True, argument(group_advantages, "scale"), "group"),
    Row("gamma", 1.0, argument(fastrl.gae, "gamma")),
    Row("lam", 1.0),
    Row("adv_estimator", "gae"),
    Row("use_kl_in_reward", False),
    Row("rollout_correction", None, presets("verl", "rollout_correction", ALL)),
]
VERL_CORRECTION = [
    Row("rollout_is", "sequence"),
    Row("rollout_is_threshold", 2.0),
    Row("rollout_is_batch_normalize", False),
    Row("rollout_rs", None),
    Row("rollout_rs_threshold", None),
]
EPSILON = Ours("group_advantages(eps)", lambda: ADVANTAGE_CONVENTIONS["verl"][1])
VERL_GRPO = [
    Row("epsilon", 1e-6, EPSILON),
    *signature(
        verl.compute_grpo_outcome_advantage, **defaults(formulas.compute_grpo_outcome_advantage)
    ),
]
VERL_AGGREGATION = signature(verl.agg_loss, **defaults(formulas.agg_loss))

EVERY = "ppo grpo dapo gspo"
OPENRLHF_OPTIONS = [
    Row("actor.eps_clip", 0.2, presets("openrlhf", "clip_low", "ppo grpo dapo")),
    Row("actor.eps_clip", 0.2, presets("openrlhf", "clip_low", "gspo"), differs=3e-4),
    Row("actor.eps_clip", 0.2, presets("openrlhf", "clip_high", "ppo grpo")),
    Row("actor.eps_clip", 0.2, presets("openrlhf", "clip_high", "dapo"), differs=0.28),
    Row("actor.eps_clip", 0.2, presets("openrlhf", "clip_high", "gspo"), differs=4e-4),
    Row("actor.eps_clip_low_high", None),
    Row("actor.dual_clip", None, presets("openrlhf", "dual_clip", "ppo grpo dapo")),
    Row("actor.entropy_coef", None, presets("openrlhf", "entropy_coef", EVERY), 0.0),
    Row("actor.policy_loss_type", "ppo"),
    Row("actor.loss_agg_mode", "token-mean", presets("openrlhf", "aggregation", "ppo grpo dapo")),
    Row("algo.kl.use_loss", False, presets("openrlhf", "kl_coef", EVERY), 0.0),
    Row("algo.kl.estimator", "k1", presets("openrlhf", "kl_estimator", EVERY), differs="k3"),
    Row(
        "algo.kl.unbiased_gradient",
        False,
        presets("openrlhf", "kl_gradient", EVERY),
        "exact",
    ),
    Row("algo.kl.init_coef", 0.01),
    Row("algo.advantage.is_correction_level", "off"),
    Row("algo.advantage.is_correction_mode", "mask"),
    Row("algo.advantage.is_correction_gating", "ratio"),
    Row("algo.advantage.is_correction_threshold", [0.5, 5.0]),
    Row("algo.advantage.no_std_norm", False),
    Row("algo.advantage.gamma", 1, argument(fastrl.gae, "gamma")),
    Row("algo.advantage.lambd", 1),
    Row("rollout.temperature", 1.0, argument(openrlhf.log_probs_from_logits, "temperature")),
    Row("critic.value_clip", 0.5),
]
OPENRLHF_POLICY = signature(
    openrlhf.PolicyLoss,
    clip_eps_low=0.2,
    clip_eps_high=0.2,
    dual_clip=None,
    token_level_loss=True,
    policy_loss_type="ppo",
    is_correction_level="off",
    is_correction_mode="mask",
    is_correction_gating="ratio",
    is_correction_threshold=(0.5, 5.0),
)
OPENRLHF_VALUE = signature(openrlhf.ValueLoss, **defaults(openrlhf_formulas.ValueLoss))
OPENRLHF_KL = signature(openrlhf.compute_approx_kl, **defaults(openrlhf_formulas.compute_approx_kl))
OF_LIGER = {**liger_formulas.DEFAULTS, "compiled": True, "chunk_size": 1}
LIGER_GRPO = signature(liger.LigerFusedLinearGRPOLoss, **OF_LIGER)
LIGER_JSD = signature(liger.LigerFusedLinearJSDLoss, **defaults(liger_formulas.Distillation))
OF_BOTH = """
learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
remove_unused_columns num_generations num_generations_eval ds3_gather_for_generation
shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation top_p top_k min_p
generation_kwargs chat_template_kwargs repetition_penalty cache_implementation
use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex
vllm_server_* vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
vllm_tensor_parallel_size num_iterations reward_weights sync_ref_model ref_model_*
log_* num_completions_to_print *transformers_*
"""
OF_GRPO = """
cast_lm_head_to_fp32 entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
max_tool_calling_iterations vllm_importance_sampling_cap
"""
OF_RLOO = "temperature max_completion_length mask_truncated_completions"
OF_BASE = """
logging_steps gradient_checkpointing bf16 lr_scheduler_kwargs use_liger_kernel
torch_empty_cache_steps
"""
OF_ACTOR = """
strategy ppo_mini_batch_size ppo_micro_batch_size ppo_*_per_gpu use_dynamic_bsz
freeze_vision_tower policy_loss calculate_entropy calculate_sum_pi_squared use_prefix_grouper
use_torch_compile ppo_epochs shuffle data_loader_seed checkpoint optim use_fused_kernels profiler
engine rollout_n model_config global_batch_info qat
"""
OF_FSDP = """
strategy grad_clip ulysses_sequence_parallel_size entropy_from_logits_* entropy_checkpointing
pad_to_length fsdp_config use_remove_padding use_rollout_log_probs
"""
OF_ALGORITHM = "kl_penalty kl_ctrl use_pf_ppo pf_ppo filter_groups gdpo_reward_*"
OF_CORRECTION = "bypass_mode loss_type"
OF_PARSER = """
ref.* reward.* vllm.* train.* eval.* ckpt.* logger.* ds.* data.* local_rank use_ms {prefix}.*
actor.num_* actor.gradient_checkpointing_* actor.aux_loss_coef actor.model_name_or_path
actor.freeze_visual_encoder critic.num_* critic.freezing_steps critic.save_value_network
critic.model_name_or_path rollout.max_* rollout.*batch_size rollout.top_p
rollout.n_samples_per_prompt algo.dynamic_filtering_* algo.kl.target algo.kl.horizon
algo.advantage.estimator
"""
CORE, ALGORITHM = "trainer/ppo/core_algos.py", "trainer/config/algorithm.py"
ACTOR, LOSS = "workers/config/actor.py", "models/loss.py"
CHUNKED = "chunked_loss"
SOURCES = [
    Source("trl", "1.16", OF_TRL, "GRPOConfig", TRL, f"{OF_BOTH} {OF_GRPO}"),
    Source("trl", "1.16", "experimental/gmpo/gmpo_config.py", "GMPOConfig", TRL_GMPO),
    Source("trl", "1.16", "trainer/rloo_config.py", "RLOOConfig", TRL_RLOO, f"{OF_BOTH} {OF_RLOO}"),
    Source("trl", "1.16", "trainer/base_config.py", "_BaseConfig", [], OF_BASE),
    Source("verl", "0.9.1", ACTOR, "ActorConfig", VERL_ACTOR, OF_ACTOR),
    Source("verl", "0.9.1", ACTOR, "FSDPActorConfig", [], OF_FSDP),
    Source("verl", "0.9.1", ACTOR, "PolicyLossConfig", VERL_POLICY, "rollout_correction"),
    Source("verl", "0.9.1", ALGORITHM, "AlgoConfig", VERL_ALGORITHM, OF_ALGORITHM),
    Source("verl", "0.9.1", ALGORITHM, "KLControlConfig", [], "type kl_coef horizon target_kl"),
    Source("verl", "0.9.1", ALGORITHM, "RolloutCorrectionConfig", VERL_CORRECTION, OF_CORRECTION),
    Source("verl", "0.9.1", CORE, "compute_grpo_outcome_advantage", VERL_GRPO),
    Source("verl", "0.9.1", CORE, "agg_loss", VERL_AGGREGATION),
    Source("openrlhf", "0.11.2", "cli/train_ppo_ray.py", "", OPENRLHF_OPTIONS, OF_PARSER),
    Source("openrlhf", "0.11.2", LOSS, "PolicyLoss", OPENRLHF_POLICY),
    Source("openrlhf", "0.11.2", LOSS, "ValueLoss", OPENRLHF_VALUE),
    Source("openrlhf", "0.11.2", "models/utils.py", "compute_approx_kl", OPENRLHF_KL),
    Source(
        "liger_kernel", "0.8.5", f"{CHUNKED}/grpo_loss.py", "LigerFusedLinearGRPOLoss", LIGER_GRPO
    ),
    Source("liger_kernel", "0.8.5", f"{CHUNKED}/jsd_loss.py", "LigerFusedLinearJSDLoss", LIGER_JSD),
]
