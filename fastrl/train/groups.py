"""The groups of a step: rounds of sampling until enough groups are informative."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.train import rewards, rollout
from fastrl.train.config import GrpoConfig
from fastrl.train.prompts import Prompt, deal
from fastrl.train.rewards import Scored
from fastrl.train.rollout import Rollout


class SampledGroups:
    """A collection of ``prompts_per_step`` groups in at most ``sampling_rounds`` rounds.

    With several rounds (DAPO, https://arxiv.org/abs/2503.14476, section 3.2), a group that is not
    `informative` is kept only if no round brings another group to replace it.
    """

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config
        self._kept: list[_Round] = []
        self._spare: list[_Round] = []
        self.rounds = 0
        self.failures = 0  # completions of all rounds on which a reward function failed

    @property
    def missing(self) -> int:
        """The number of informative groups that are missing; 0 after the last round."""
        if self.rounds >= self._config.sampling_rounds:
            return 0
        return max(0, self._config.prompts_per_step - sum(part.groups for part in self._kept))

    def prompts(self, train: list[Prompt], step: int) -> list[Prompt]:
        """Return the prompts of the next round, one per missing group, in this round's order."""
        order = self._config.seed + 2**31 * self.rounds
        count = self._config.prompts_per_step
        return deal(train, count=count, step=step, seed=order)[: self.missing]

    def add(self, sampled: Rollout, scored: Scored) -> None:
        """Add the completions of a round, each group in consecutive rows, and their rewards."""
        self.rounds += 1
        self.failures += int(scored.failed.sum())
        size = self._config.group_size
        kept = informative(scored, size) | (self._config.sampling_rounds == 1)
        of_group = torch.arange(len(scored.total)).view(-1, size)
        for chosen, where in ((kept, self._kept), (~kept, self._spare)):
            rows = of_group[chosen].flatten()
            if len(rows):
                where.append(_Round(sampled.rows(rows), scored.rows(rows), len(rows) // size))

    def batch(self) -> tuple[Rollout, Scored]:
        """Return the completions of the groups, and their rewards."""
        count = self._config.prompts_per_step * self._config.group_size
        parts = [*self._kept, *self._spare]
        sampled = rollout.concatenate([part.sampled for part in parts])
        scored = rewards.concatenate([part.scored for part in parts])
        return sampled.rows(torch.arange(count)), scored.rows(torch.arange(count))


def informative(scored: Scored, group_size: int) -> Tensor:
    """Return which groups have rewards that differ, without the length penalty ``overlong``.

    The lengths of equally right answers always differ, and DAPO counts right answers (equation 11).
    """
    rewards = scored.unshaped.view(-1, group_size)
    lowest = rewards.nan_to_num(nan=torch.inf).amin(1)
    return rewards.nan_to_num(nan=-torch.inf).amax(1) > lowest


def compared(scored: Scored, config: GrpoConfig) -> Tensor:
    """Return which completions have an advantage in their group, bool [N].

    They have a reward, and with several rounds their group is informative.
    """
    if config.sampling_rounds == 1:
        return scored.known
    size = config.group_size
    return scored.known & informative(scored, size).repeat_interleave(size)


class _Round(NamedTuple):
    sampled: Rollout
    scored: Scored
    groups: int
