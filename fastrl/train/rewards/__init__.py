"""Rewards: ready functions and a user's own, called on strings, their results checked and added."""

from fastrl.train.rewards.functions import exact_match
from fastrl.train.rewards.lengths import length_penalty, overlong
from fastrl.train.rewards.numbers import number_equality
from fastrl.train.rewards.patterns import has_format, regular_expression
from fastrl.train.rewards.scoring import Failure, RewardError, RewardFunction
from fastrl.train.rewards.selection import make_rewards
from fastrl.train.rewards.weighted import Rewards, Scored

__all__ = [
    "Failure",
    "RewardError",
    "RewardFunction",
    "Rewards",
    "Scored",
    "exact_match",
    "has_format",
    "length_penalty",
    "make_rewards",
    "number_equality",
    "overlong",
    "regular_expression",
]
