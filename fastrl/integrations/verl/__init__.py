"""verl on fastrl: token functions, advantages, losses and registered policy losses.

    with fastrl.integrations.verl.use_fastrl():
        ...  # or keep the handle and call undo()

verl's workers are separate processes; `fastrl.integrations.verl.plugin` reaches them.
"""

from __future__ import annotations

import sys

from fastrl.integrations.replacing import Replaced, Replacement, named
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
_LOSSES = (
    policy_losses.vanilla,
    policy_losses.gspo,
    policy_losses.sapo,
    policy_losses.cispo,
    policy_losses.geo_mean,
    policy_losses.gpg,
    policy_losses.dro,
    policy_losses.reinforce,
    selected_tokens.dppo_tv,
    selected_tokens.dppo_kl,
    selected_tokens.clip_cov,
    selected_tokens.kl_cov,
)
_REPLACEMENTS = [
    *named(_TOKENS, logprobs_from_logits, entropy_from_logits),
    *named(
        _TOKENS,
        entropy_from_logits_with_chunking,
        calculate_sum_pi_squared_from_logits,
        optional=True,
    ),
    *named(_CORE, compute_gae_advantage_return, compute_grpo_outcome_advantage),
    *named(_CORE, agg_loss, compute_value_loss, kl_penalty),
    *named(_CORE, *_ESTIMATORS, optional=True),
    *(
        Replacement(
            _CORE,
            f"compute_policy_loss_{loss.__name__}",
            loss,
            optional=loss not in (policy_losses.vanilla, policy_losses.gspo),
        )
        for loss in _LOSSES
    ),
    *distillation.REPLACEMENTS,
    *fused_linear.REPLACEMENTS,
    *vocabulary_parallel.REPLACEMENTS,
]
