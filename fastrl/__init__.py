"""fastrl: fused losses, log-probabilities and advantages for reinforcement learning of LLMs."""

from fastrl import command_start as _command_start  # noqa: F401  first: torch takes seconds
from fastrl import native as _native  # noqa: F401  registers the operators
from fastrl.backend import MissingBackendWarning, get_backend, set_backend
from fastrl.objective import Objective
from fastrl.objective.gamma_weights import GammaWeights
from fastrl.objective.rollout_correction import RolloutCorrection
from fastrl.objective.trust_region import TrustRegion
from fastrl.ops.divergence import linear_divergence, token_divergence
from fastrl.ops.gae import Gae, discounted_returns, gae
from fastrl.ops.global_normalizer import global_normalizer
from fastrl.ops.group_advantages import GroupAdvantages, group_advantages
from fastrl.ops.kept_tokens import KeptTokens
from fastrl.ops.kl_divergence import kl_divergence
from fastrl.ops.linear_policy_loss import linear_policy_loss
from fastrl.ops.linear_token_stats import linear_token_logprobs, linear_token_stats
from fastrl.ops.logits_policy_loss import logits_policy_loss
from fastrl.ops.masked import masked_mean, whiten
from fastrl.ops.metrics import reduce_metrics
from fastrl.ops.policy_loss import PolicyLoss, clipped_tokens, policy_loss
from fastrl.ops.teacher import Teacher
from fastrl.ops.token_stats import TokenStats, token_logprobs, token_stats
from fastrl.ops.token_weights import token_weights
from fastrl.ops.top_k_logprobs import TopKLogprobs
from fastrl.ops.value_loss import ValueLoss, value_loss

__version__ = "0.1.0"

__all__ = [
    "Gae",
    "GammaWeights",
    "GroupAdvantages",
    "KeptTokens",
    "MissingBackendWarning",
    "Objective",
    "PolicyLoss",
    "RolloutCorrection",
    "Teacher",
    "TokenStats",
    "TopKLogprobs",
    "TrustRegion",
    "ValueLoss",
    "__version__",
    "clipped_tokens",
    "discounted_returns",
    "gae",
    "get_backend",
    "global_normalizer",
    "group_advantages",
    "kl_divergence",
    "linear_divergence",
    "linear_policy_loss",
    "linear_token_logprobs",
    "linear_token_stats",
    "logits_policy_loss",
    "masked_mean",
    "policy_loss",
    "reduce_metrics",
    "set_backend",
    "token_divergence",
    "token_logprobs",
    "token_stats",
    "token_weights",
    "value_loss",
    "whiten",
]
