"""The groups of a step: rounds of sampling until enough groups are informative."""

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
        self._rounds: list[tuple[Rollout, Scored]] = []
        self.failures = 0  # completions of all rounds on which a reward function failed

    @property
    def rounds(self) -> int:
        """The number of rounds so far."""
        return len(self._rounds)

    @property
    def missing(self) -> int:
        """The number of informative groups that are missing; 0 after the last round."""
        if self.rounds >= self._config.sampling_rounds:
            return 0
        size = self._config.group_size
        found = sum(int(informative(scored, size).sum()) for _, scored in self._rounds)
        return max(0, self._config.prompts_per_step - found)

    def prompts(self, train: list[Prompt], step: int) -> list[Prompt]:
        """Return the prompts of the next round, one per missing group, in this round's order."""
        order = self._config.seed + 2**31 * self.rounds
        count = self._config.prompts_per_step
        return deal(train, count=count, step=step, seed=order)[: self.missing]

    def add(self, sampled: Rollout, scored: Scored) -> None:
        """Add the completions of a round, each group in consecutive rows, and their rewards."""
        self._rounds.append((sampled, scored))
        self.failures += int(scored.failed.sum())

    def batch(self) -> tuple[Rollout, Scored]:
        """Return the completions of the groups, and their rewards."""
        if self.rounds == 1:
            return self._rounds[0]
        sampled, scored = zip(*self._rounds, strict=True)
        every, size = rewards.concatenate(scored), self._config.group_size
        # those of each round in their order, and then what must fill up
        order = (~informative(every, size)).int().argsort(stable=True)
        of_group = torch.arange(len(every.total)).view(-1, size)
        rows = of_group[order[: self._config.prompts_per_step]].flatten()
        return rollout.concatenate(list(sampled)).rows(rows), every.rows(rows)


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
