"""The groups of a step: rounds of sampling until there are enough with information."""

from typing import NamedTuple

import torch

from fastrl.train.config import GrpoConfig
from fastrl.train.data.prompts import Prompt, deal
from fastrl.train.rewards.weighted import Scored
from fastrl.train.rewards.weighted import concatenate as concatenate_scored
from fastrl.train.rollout import Rollout, concatenate
from fastrl.train.sampling import TokenCount


class SampledGroups:
    """Collects ``prompts_per_step`` groups, with ``dynamic_sampling`` over several rounds.

    Without it one round is enough. With it (DAPO, https://arxiv.org/abs/2503.14476, section 3.2), a
    group whose rewards are all equal is kept only if no round brings one to replace it.
    """

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config
        self._kept: list[_Round] = []
        self._spare: list[_Round] = []
        self.rounds = 0
        self.failures = 0  # completions of all rounds on which a reward function failed
        self.tokens: list[TokenCount] = []

    @property
    def missing(self) -> int:
        """How many groups with information are missing; 0 after the last round."""
        config = self._config
        last = config.max_sampling_rounds if config.dynamic_sampling else 1
        if self.rounds >= last:
            return 0
        kept = sum(part.groups for part in self._kept)
        return max(0, config.prompts_per_step - kept)

    def prompts(self, train: list[Prompt], step: int) -> list[Prompt]:
        """The prompts of the next round: as many as are missing, from another order each round."""
        order = self._config.seed + 2**31 * self.rounds
        count = self._config.prompts_per_step
        return deal(train, count=count, step=step, seed=order)[: self.missing]

    def add(self, rollout: Rollout, scored: Scored, tokens: TokenCount) -> None:
        """Add the completions of a round, a group in consecutive rows, and their rewards."""
        self.rounds += 1
        self.failures += int(scored.failed.sum())
        self.tokens.append(tokens)
        size = self._config.group_size
        groups = scored.total.view(-1, size)
        kept = (groups != groups[:, :1]).any(1) | (not self._config.dynamic_sampling)
        of_group = torch.arange(len(scored.total)).view(-1, size)
        for chosen, where in ((kept, self._kept), (~kept, self._spare)):
            rows = of_group[chosen].flatten()
            if len(rows):
                where.append(_Round(rollout.rows(rows), scored.rows(rows), len(rows) // size))

    def batch(self) -> tuple[Rollout, Scored]:
        """The completions of the groups, and their rewards."""
        count = self._config.prompts_per_step * self._config.group_size
        parts = [*self._kept, *self._spare]
        rollout = concatenate([part.rollout for part in parts])
        scored = concatenate_scored([part.scored for part in parts])
        return rollout.rows(torch.arange(count)), scored.rows(torch.arange(count))


class _Round(NamedTuple):
    rollout: Rollout
    scored: Scored
    groups: int
