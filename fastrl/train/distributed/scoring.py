"""Rewards of a batch whose completions the ranks share."""

from collections.abc import Callable, Sequence
from typing import Any

from fastrl.train.distributed import ranks
from fastrl.train.rewards.weighted import Scored, concatenate
from fastrl.train.run import checkpoint


def in_shares(score: Callable[..., Scored], *columns: Sequence[Any], group_size: int = 1) -> Scored:
    """``score(*columns)``, each rank for a share of whole groups of the rows.

    The generators are those of the first rank afterwards, on all ranks: a reward function may use
    random numbers.

    Returns:
        The rewards of all completions, on all ranks.

    Raises:
        RewardError: On all ranks, if the function fails on one.
    """
    if ranks.count() == 1:
        return score(*columns)
    groups = len(columns[0]) // group_size
    begin, end = (groups * (ranks.index() + i) // ranks.count() * group_size for i in (0, 1))
    own = [column[begin:end] for column in columns]
    parts = ranks.together(lambda: score(*own) if begin < end else None)
    checkpoint.set_rng_state(ranks.from_first(checkpoint.rng_state))
    return concatenate([part for part in parts if part is not None])
