"""Reward functions: imported by name, called on strings, their results checked."""

from fastrl.train.rewards.functions import exact_match
from fastrl.train.rewards.scoring import RewardError, RewardFunction, import_reward, score

__all__ = ["RewardError", "RewardFunction", "exact_match", "import_reward", "score"]
