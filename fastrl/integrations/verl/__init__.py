"""verl on fastrl: its token functions, advantages, losses and registered policy losses.

with fastrl.integrations.verl.use_fastrl():
    ...  # or keep the handle and call undo()

verl's workers are separate processes; for these use `fastrl.integrations.verl.plugin`.
"""

from __future__ import annotations

from fastrl.integrations.replacing import Replaced, Replacement
from fastrl.integrations.support import Support
from fastrl.integrations.verl import policy_losses
from fastrl.integrations.verl.aggregation import agg_loss
from fastrl.integrations.verl.functions import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_value_loss,
    entropy_from_logits,
    entropy_from_logits_with_chunking,
    kl_penalty,
    logprobs_from_logits,
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
    "Tested with verl 0.9.1: each function, verl's `ppo_loss` with entropy and KL on top of them, "
    "and verl's unit tests of them."
)


def use_fastrl() -> Replaced:
    """Replace verl's functions with fastrl's wherever verl has loaded them, in this process.

    With the names, arguments and metrics of verl 0.9, this replaces `logprobs_from_logits`,
    `entropy_from_logits` (and its chunked form), `compute_gae_advantage_return`,
    `compute_grpo_outcome_advantage` (and its vectorized form), `agg_loss`, `compute_value_loss`,
    `kl_penalty`, and the registered policy losses vanilla, gspo, sapo, cispo, geo_mean and gpg.
    Everything else (dppo_tv, dppo_kl, clip_cov, kl_cov, dro, bypass_mode, estimators such as
    rloo) remains verl's. Call it before verl builds its engines, which compile the entropy
    function that they find.

    Results equal verl's except that masked tokens give 0; log-probabilities and entropies are fp32
    even from 16-bit logits; a group of equal rewards gives exactly 0; an empty mask gives 0 where
    verl gives NaN or an error; log-ratios that verl does not clamp saturate at 80. Mask values
    other than 0 and 1 are factors, as in verl.

    Returns:
        A handle with `undo()` and `names`, which is also a context manager.

    Raises:
        ImportError: verl is not importable.
        NotImplementedError: a function of this verl is missing, has other parameters than in
            verl 0.9, or was already replaced; nothing is changed.
        RuntimeError: verl runs on fastrl already.
    """
    return Replaced(
        "verl", _REPLACEMENTS, registries=("POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY")
    )


_TOKENS = "verl.utils.torch_functional"
_CORE = "verl.trainer.ppo.core_algos"
_REPLACEMENTS = [
    Replacement(_TOKENS, "logprobs_from_logits", logprobs_from_logits),
    Replacement(_TOKENS, "entropy_from_logits", entropy_from_logits),
    Replacement(
        _TOKENS, "entropy_from_logits_with_chunking", entropy_from_logits_with_chunking, True
    ),
    Replacement(_CORE, "compute_gae_advantage_return", compute_gae_advantage_return),
    Replacement(_CORE, "compute_grpo_outcome_advantage", compute_grpo_outcome_advantage),
    Replacement(
        _CORE,
        "compute_grpo_vectorized_outcome_advantage",
        compute_grpo_vectorized_outcome_advantage,
        True,
    ),
    Replacement(_CORE, "agg_loss", agg_loss),
    Replacement(_CORE, "compute_value_loss", compute_value_loss),
    Replacement(_CORE, "kl_penalty", kl_penalty),
    Replacement(_CORE, "compute_policy_loss_vanilla", policy_losses.vanilla),
    Replacement(_CORE, "compute_policy_loss_gspo", policy_losses.gspo),
    Replacement(_CORE, "compute_policy_loss_sapo", policy_losses.sapo, True),
    Replacement(_CORE, "compute_policy_loss_cispo", policy_losses.cispo, True),
    Replacement(_CORE, "compute_policy_loss_geo_mean", policy_losses.geo_mean, True),
    Replacement(_CORE, "compute_policy_loss_gpg", policy_losses.gpg, True),
]

#: How a function differs from verl's.
_NOTES = {
    "logprobs_from_logits": "fp32 also from 16-bit logits; `inplace_backward` as with flash-attn",
    "entropy_from_logits": "fp32 also from 16-bit logits; logits of `-inf` contribute 0",
    "compute_gae_advantage_return": "masked tokens give 0",
    "compute_grpo_outcome_advantage": "a group of equal rewards gives exactly 0",
    "agg_loss": "an empty mask gives 0",
    "kl_penalty": "`full` is refused, as in verl",
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
        option="loss modes `dppo_tv`, `dppo_kl`, `clip_cov`, `kl_cov`, `dro`, `bypass_mode`, and "
        "losses that a user registers",
        handling="unchanged",
        note="where they call functions above, these are fastrl's",
    ),
    Support(
        option="advantage estimators `rloo`, `reinforce_plus_plus`, `remax`, `opo`, `gpg`, `gdpo`, "
        "`grpo_passk`, optimal token baselines",
        handling="unchanged",
        note="`gdpo` normalizes with `compute_grpo_outcome_advantage`, which is fastrl's",
    ),
    Support(
        option="`use_fused_kernels=True`, vocabulary-parallel log-probabilities (Megatron)",
        handling="unchanged",
    ),
    Support(
        option="logits that are a nested tensor or a DTensor",
        handling="refused",
        note="verl's engines gather and unpad them first",
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
