"""verl on fastrl: token functions, advantages, losses and registered policy losses.

    with fastrl.integrations.verl.use_fastrl():
        ...  # or keep the handle and call undo()

verl's workers are separate processes; `fastrl.integrations.verl.plugin` reaches them.
"""

from __future__ import annotations

import sys

from fastrl.integrations.replacing import Replaced, Replacement
from fastrl.integrations.support import Support
from fastrl.integrations.verl import (
    advantages,
    distillation,
    fused_linear,
    group_baselines,
    group_normalized,
    policy_losses,
    selected_tokens,
    vocabulary_parallel,
)
from fastrl.integrations.verl.advantages import compute_gae_advantage_return
from fastrl.integrations.verl.aggregation import agg_loss
from fastrl.integrations.verl.functions import (
    calculate_sum_pi_squared_from_logits,
    compute_value_loss,
    entropy_from_logits,
    entropy_from_logits_with_chunking,
    kl_penalty,
    logprobs_from_logits,
)
from fastrl.integrations.verl.group_normalized import (
    compute_grpo_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
)

__all__ = [
    "SUPPORT",
    "TESTED",
    "agg_loss",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_value_loss",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "kl_penalty",
    "logprobs_from_logits",
    "use_fastrl",
]

TESTED = (
    "Tested with verl 0.9.1: each function, verl's unit tests of the functions, and verl's "
    "`ppo_loss` with entropy and KL. `use_fused_kernels=True` was also tested on a CPU: in updates "
    "by verl's training worker with FSDP2 on one rank and on two, and in Megatron's fused forward "
    "and on its logits with Megatron Core 0.16.1 on two ranks."
)


def use_fastrl() -> Replaced:
    """Replace verl's functions with fastrl's wherever verl has loaded them, in this process.

    This replaces, with the names, arguments and metrics of verl 0.9, `logprobs_from_logits`,
    `entropy_from_logits` (and its chunked form), `calculate_sum_pi_squared_from_logits`,
    `agg_loss`, `compute_value_loss`, `kl_penalty`, all registered advantage estimators except the
    optimal token baselines, and all registered policy losses except bypass_mode, which calls two of
    them. Everything else remains verl's. Make the call before verl builds its engines, which
    compile the entropy function that they find.

    The functions behind `use_fused_kernels=True` (`FusedLinearForPPO`, `linear_cross_entropy`) and
    for a vocabulary that Megatron's ranks share (`vocab_parallel_*`) are in modules that import
    Liger, Triton or Megatron, and `compute_forward_kl_topk` is in a module that only distillation
    needs. They are replaced when verl imports these modules.

    Results equal verl's with these exceptions. Masked tokens give 0. Log-probabilities and
    entropies are fp32 even from 16-bit logits. A group of equal rewards gives exactly 0. An empty
    mask, or a single token to whiten, gives 0, where verl gives NaN or an error. A token id of -100
    gives 0, and any other id outside the vocabulary an error. Log-ratios that verl does not clamp
    saturate at 80. Mask values other than 0 and 1 are factors, as in verl.

    Returns:
        A handle with `undo()` and `names`, which is also a context manager.

    Raises:
        ImportError: verl is not importable.
        NotImplementedError: a function of this verl is missing, has other parameters than in
            verl 0.9, or was already replaced; nothing is changed. In a module that verl imports
            later, the import raises it.
        RuntimeError: verl runs on fastrl already, through another call or through the plug-in.

    Examples:
        >>> from fastrl.integrations.verl import use_fastrl
        >>> handle = use_fastrl()  # doctest: +SKIP
    """
    try:
        return Replaced(
            "verl", _REPLACEMENTS, registries=("POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY")
        )
    except RuntimeError as error:
        handle = getattr(sys.modules.get(_PLUGIN), "replaced", None)
        if handle is None or not handle.names:
            raise
        raise RuntimeError(
            f"verl runs on fastrl already, through the plug-in {_PLUGIN}: leave out use_fastrl(), "
            "or undo its `replaced` first"
        ) from error


_PLUGIN = "fastrl.integrations.verl.plugin"


_TOKENS = "verl.utils.torch_functional"
_CORE = "verl.trainer.ppo.core_algos"
#: Estimators that not every verl 0.9 has.
_ESTIMATORS = (
    group_normalized.compute_grpo_vectorized_outcome_advantage,
    group_normalized.compute_grpo_passk_outcome_advantage,
    group_normalized.compute_gdpo_outcome_advantage,
    advantages.compute_reinforce_plus_plus_outcome_advantage,
    group_baselines.compute_reinforce_plus_plus_baseline_outcome_advantage,
    advantages.compute_remax_outcome_advantage,
    group_baselines.compute_rloo_outcome_advantage,
    group_baselines.compute_rloo_vectorized_outcome_advantage,
    group_baselines.compute_opo_outcome_advantage,
    group_baselines.compute_gpg_outcome_advantage,
)
_REPLACEMENTS = [
    Replacement(_TOKENS, "logprobs_from_logits", logprobs_from_logits),
    Replacement(_TOKENS, "entropy_from_logits", entropy_from_logits),
    Replacement(
        _TOKENS,
        "entropy_from_logits_with_chunking",
        entropy_from_logits_with_chunking,
        optional=True,
    ),
    Replacement(
        _TOKENS,
        "calculate_sum_pi_squared_from_logits",
        calculate_sum_pi_squared_from_logits,
        optional=True,
    ),
    Replacement(_CORE, "compute_gae_advantage_return", compute_gae_advantage_return),
    Replacement(_CORE, "compute_grpo_outcome_advantage", compute_grpo_outcome_advantage),
    *(Replacement(_CORE, function.__name__, function, optional=True) for function in _ESTIMATORS),
    Replacement(_CORE, "agg_loss", agg_loss),
    Replacement(_CORE, "compute_value_loss", compute_value_loss),
    Replacement(_CORE, "kl_penalty", kl_penalty),
    Replacement(_CORE, "compute_policy_loss_vanilla", policy_losses.vanilla),
    Replacement(_CORE, "compute_policy_loss_gspo", policy_losses.gspo),
    Replacement(_CORE, "compute_policy_loss_sapo", policy_losses.sapo, optional=True),
    Replacement(_CORE, "compute_policy_loss_cispo", policy_losses.cispo, optional=True),
    Replacement(_CORE, "compute_policy_loss_geo_mean", policy_losses.geo_mean, optional=True),
    Replacement(_CORE, "compute_policy_loss_gpg", policy_losses.gpg, optional=True),
    Replacement(_CORE, "compute_policy_loss_dro", policy_losses.dro, optional=True),
    Replacement(_CORE, "compute_policy_loss_reinforce", policy_losses.reinforce, optional=True),
    Replacement(_CORE, "compute_policy_loss_dppo_tv", selected_tokens.dppo_tv, optional=True),
    Replacement(_CORE, "compute_policy_loss_dppo_kl", selected_tokens.dppo_kl, optional=True),
    Replacement(_CORE, "compute_policy_loss_clip_cov", selected_tokens.clip_cov, optional=True),
    Replacement(_CORE, "compute_policy_loss_kl_cov", selected_tokens.kl_cov, optional=True),
    *distillation.REPLACEMENTS,
    *fused_linear.REPLACEMENTS,
    *vocabulary_parallel.REPLACEMENTS,
]

#: How a function differs from verl's.
_NOTES = {
    "logprobs_from_logits": "fp32 even from 16-bit logits; the gradient overwrites the logits "
    "where verl's does: with `inplace_backward` and flash-attn, unless "
    "`VERL_DISABLE_FLASH_ATTN_CE=1`",
    "entropy_from_logits": "fp32 even from 16-bit logits; logits of `-inf` contribute 0",
    "calculate_sum_pi_squared_from_logits": "fp32 even from 16-bit logits; without a gradient",
    "compute_gae_advantage_return": "masked tokens give 0",
    "compute_grpo_outcome_advantage": "a group of equal rewards gives exactly 0",
    "compute_grpo_passk_outcome_advantage": "a group of one is refused, as in verl",
    "compute_remax_outcome_advantage": "masked tokens give 0",
    "agg_loss": "an empty mask gives 0",
    "compute_policy_loss_gspo": "aggregates like the function that it replaces: by `loss_agg_mode` "
    "in verl 0.9.1, always by `seq-mean-token-mean` in 0.9.0 and 0.10.0.dev",
    "compute_policy_loss_dro": "the objective is a Python function",
    "compute_policy_loss_reinforce": "one of the two losses of `bypass_mode`",
    "compute_policy_loss_dppo_tv": "runs on the kernels of `cispo`; dropped tokens have weight 0",
    "compute_policy_loss_dppo_kl": "runs on the kernels of `cispo`; dropped tokens have weight 0",
    "compute_policy_loss_clip_cov": "runs on the kernels of `ppo`; draws the same tokens as verl",
    "compute_policy_loss_kl_cov": "the objective is a Python function; selects tokens on the "
    "device",
    "kl_penalty": "`full` is the exact KL from log-probabilities or logits `[B, T, V]`. From the "
    "`[B, T]` of verl's batches it is refused, as in verl; `fastrl.linear_policy_loss(..., "
    "teacher=teacher, objective=Objective(kl_estimator='exact', kl_coef=...))` computes it from "
    "hidden states",
    "compute_forward_kl_topk": "for distillation with `loss_mode=forward_kl_topk` on FSDP and "
    "VeOmni; fp32 even from 16-bit logits. `use_chunked_topk` has no effect: metrics find the "
    "student's K tokens in the logits, as verl does with that option",
    "FusedLinearForPPO.forward": "for `use_fused_kernels=True` with `impl_backend` `torch` or "
    "`liger`; entropies are fp32; an id of -100 gives 0, where verl raises an error",
    "linear_cross_entropy": "for `use_fused_kernels=True` with `impl_backend` `triton`, and for "
    "Megatron; also runs on a CPU, and with hidden sizes that 128 does not divide",
    "vocab_parallel_log_probs_from_logits": "for Megatron; the backward overwrites float32 logits, "
    "as Megatron's forward does, and the forward none. An id of -100 gives 0; other ids outside "
    "the vocabulary raise an error, where Megatron returns a value",
    "vocab_parallel_entropy": "for Megatron; fp32 even from 16-bit logits",
    "vocab_parallel_sum_pi_squared": "for Megatron; without a gradient",
}

SUPPORT = [
    *(
        Support(option=f"`{item.name}`", handling="replaced", note=_NOTES.get(item.name, ""))
        for item in _REPLACEMENTS
    ),
    Support(
        option="a `response_mask` with values other than 0 and 1",
        handling="replaced",
        note="the values are factors, as in verl",
    ),
    Support(
        option="an estimator that whitens (GAE, REINFORCE++ and its baseline, GDPO) on a mask of "
        "one token or none",
        handling="replaced",
        note="gives 0; verl raises an error",
    ),
    Support(
        option="loss mode `bypass_mode`, and losses and estimators that a user registers",
        handling="unchanged",
        note="if they call functions above, they get fastrl's: `bypass_mode` weights and rejects "
        "tokens, then calls `vanilla` or `reinforce`",
    ),
    Support(
        option="advantage estimators `optimal_token_baseline`, `tir_optimal_token_baseline`",
        handling="unchanged",
        note="fastrl has no baseline for each position of a group",
    ),
    Support(
        option="distillation with `loss_mode` `kl`, `k1`, `abs`, `mse`, `k2`, `low_var_kl`, `k3`",
        handling="replaced",
        note="verl's functions of distillation call `kl_penalty`, `agg_loss` and "
        "`compute_policy_loss_vanilla`",
    ),
    Support(
        option="distillation with `loss_mode=forward_kl_topk` in Megatron, or in VeOmni's fused "
        "kernel",
        handling="unchanged",
        note="these functions also pack sequences and split them over ranks",
    ),
    Support(
        option="distillation by a divergence: of the whole vocabulary, or of K tokens and the rest",
        handling="unchanged",
        note="verl has none: its loss of K tokens leaves out the rest. "
        "`fastrl.linear_policy_loss(..., teacher=teacher, objective=Objective(teacher_coef=...))` "
        "computes both, with `Teacher.from_hidden`, `from_logits` or `from_top_k`",
    ),
    Support(
        option="`use_fused_kernels=True` with FSDP2 and an LM head that is not tied",
        handling="replaced",
        note="verl 0.9.1 stops with an error about DTensors; fastrl gathers the head",
    ),
    Support(
        option="`use_fused_kernels=True` with a head that has a bias, softcap, scale or LoRA",
        handling="replaced",
        note="these have no effect, as in verl, whose functions get only the weight",
    ),
    Support(
        option="`use_fused_kernels=True` with Megatron, `tensor_model_parallel_size > 1` and "
        "`sequence_parallel=False`",
        handling="replaced",
        note="each rank keeps its part of the gradient of the hidden states, as in verl: Megatron "
        "adds the parts only with sequence parallelism",
    ),
    Support(
        option="`use_fused_kernels=True` with the VeOmni engine",
        handling="unchanged",
        note="VeOmni computes with its own `chunk_logprobs`",
    ),
    Support(
        option="`use_fused_kernels=True` with a temperature per sample, or with "
        "`calculate_sum_pi_squared`",
        handling="refused",
        note="verl refuses it",
    ),
    Support(
        option="`top_p < 1` or `top_k` of the rollout",
        handling="unchanged",
        note="log-probabilities are over the whole vocabulary, because verl's batches have no kept "
        "tokens",
    ),
    Support(
        option="logits that are a nested tensor or a DTensor",
        handling="refused",
        note="verl's engines gather and unpad logits first",
    ),
    Support(
        option="`dp_size > 1` without the count of the global batch",
        handling="refused",
        note="as in verl",
    ),
    Support(
        option="a function with other parameters than in verl 0.9, or already replaced",
        handling="refused",
    ),
]
