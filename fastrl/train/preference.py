"""The loss of preference pairs, and its metrics."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fastrl.train.data.pairs import Pair
from fastrl.train.model.sequence_scorer import score_sequences


class PairScores(NamedTuple):
    """The rewards of n pairs, float32 ``[n]`` each, and their margins."""

    chosen: Tensor
    rejected: Tensor
    margin: Tensor


def pair_scores(model: Any, pairs: list[Pair]) -> PairScores:
    """Score the completions of some pairs in one forward."""
    scores = score_sequences(model, [p.chosen for p in pairs] + [p.rejected for p in pairs])
    chosen, rejected = scores.chunk(2)
    return PairScores(chosen, rejected, scores.new_tensor([pair.margin for pair in pairs]))


def bradley_terry(scores: PairScores) -> Tensor:
    """Minus the log-probability ``[n]`` that each chosen completion is preferred.

    It is -log sigmoid(chosen - rejected - margin): Bradley and Terry (1952), as in Ouyang et al.
    (2022, https://arxiv.org/abs/2203.02155), with the margin that Llama 2 subtracts
    (https://arxiv.org/abs/2307.09288, section 3.2.2).
    """
    return -logsigmoid(scores.chosen - scores.rejected - scores.margin)


def distance_from_center(scores: PairScores) -> Tensor:
    """(chosen + rejected)^2 ``[n]``, which draws the rewards to a mean of 0.

    The loss depends on their differences alone: Eisenstein et al. (2023,
    https://arxiv.org/abs/2312.09244).
    """
    return (scores.chosen + scores.rejected).square()


class PairMetrics:
    """Means over the pairs of a step, collected on the device and read once."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._pairs = self._real = self._padded = 0

    def add(self, scores: PairScores, losses: Tensor, pairs: list[Pair]) -> None:
        """Add a micro-batch: its scores, its losses ``[n]`` and its pairs."""
        chosen, rejected = scores.chosen.detach(), scores.rejected.detach()
        right = (chosen > rejected).float()
        columns = torch.stack([losses.detach(), right, chosen, rejected])
        self._sums.append(columns.double().sum(1))
        lengths = [length for pair in pairs for length in (len(pair.chosen), len(pair.rejected))]
        self._pairs += len(pairs)
        self._real += sum(lengths)
        self._padded += len(lengths) * max(lengths)

    def read(self) -> dict[str, float]:
        """Loss, accuracy, rewards and their difference; tokens with and without padding."""
        loss, accuracy, chosen, rejected = (torch.stack(self._sums).sum(0) / self._pairs).tolist()
        return {
            "loss": loss,
            "accuracy": accuracy,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "reward_margin": chosen - rejected,
            "tokens": float(self._real),
            "real_tokens": float(self._real),
            "padded_tokens": float(self._padded),
        }
