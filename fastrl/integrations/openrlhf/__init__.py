"""OpenRLHF's losses and advantages, under the same names.

    from fastrl.integrations.openrlhf import PolicyLoss  # in openrlhf/trainer/ray/ppo_actor.py
    from fastrl.integrations.openrlhf import ValueLoss  # in openrlhf/trainer/ray/ppo_critic.py
    from fastrl.integrations.openrlhf import log_probs_from_logits  # in openrlhf/models/actor.py

Each of these replaces the import of the same name in that file.
"""

from fastrl.integrations.openrlhf.advantages import get_advantages_and_returns
from fastrl.integrations.openrlhf.losses import PolicyLoss, ValueLoss
from fastrl.integrations.openrlhf.tokens import compute_approx_kl, log_probs_from_logits

__all__ = [
    "PolicyLoss",
    "ValueLoss",
    "compute_approx_kl",
    "get_advantages_and_returns",
    "log_probs_from_logits",
]
