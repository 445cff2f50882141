"""Liger's fused score centering loss, of its nightly of 27 October 2026, on fastrl."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fastrl
from fastrl.integrations.liger.grpo import tokens_of_rank

#: The upper bound of the ratio for negative advantages with `sign="ppo"`.
DUAL_CLIP = 3.0


class ISCorrection(NamedTuple):
    """A weight of the ratio r = p / q of a token: r within bounds, and another value outside.

    Attributes:
        low: lower bound of the ratio.
        high: upper bound of the ratio.
        outside: `"clamp"` for the nearest bound, `"drop"` for 0.
        sign: `"both"`, or `"ppo"`: within (0, high] if A >= 0, else within [low, 3].

    Examples:
        >>> from fastrl.integrations.liger import ISCorrection
        >>> ISCorrection(high=2.0, outside="clamp").corrections()[0].kind
        'truncate'
    """

    low: float = 0.0
    high: float = math.inf
    outside: str = "drop"
    sign: str = "both"

    def corrections(self) -> tuple[fastrl.RolloutCorrection, ...]:
        """Return the correction, or one for A >= 0 and one for A < 0.

        Raises:
            ValueError: a field is invalid.
            NotImplementedError: Liger supports the fields, but fastrl does not.
        """
        if self.outside not in ("clamp", "drop") or self.sign not in ("both", "ppo"):
            raise ValueError(
                "correction must have outside 'clamp' or 'drop' and sign 'both' or 'ppo', got "
                f"{self}"
            )
        if self.sign == "both":
            return (_correction(self.low, self.high, self.outside),)
        if self.outside == "clamp":
            raise NotImplementedError("correction must have outside='drop' with sign='ppo'")
        up, down = (0.0, self.high), (self.low, DUAL_CLIP)
        return _correction(*up, "drop"), _correction(*down, "drop")


def _correction(low: float, high: float, outside: str) -> fastrl.RolloutCorrection:
    if outside == "drop" and (low > 0 or high < math.inf):
        return fastrl.RolloutCorrection(kind="mask", low=low, high=high)
    return fastrl.RolloutCorrection(low=low, high=high)


class LigerFusedLinearScoreCenteringLoss(nn.Module):
    """REINFORCE with score centering from hidden states and LM head (arXiv 2609.20807).

    `TopKLogprobs` defines the term. The loss is the mean over the tokens of the batch.

    Args:
        score_center: whether the expected score is subtracted.
        correction: weights of the ratio of policy and sampler, or None.
        temperature: divides the logits.
        eps: least mass of the policy's tail; 1e-6.
        chunk_size: ignored.

    Raises:
        ValueError: an option is invalid.
        NotImplementedError: Liger supports the option, but fastrl does not.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.liger import LigerFusedLinearScoreCenteringLoss
        >>> loss_function = LigerFusedLinearScoreCenteringLoss()
        >>> hidden, weight = torch.ones(1, 1, 3), torch.zeros(4, 3, requires_grad=True)
        >>> q = torch.tensor([0.4, 0.2, 0.2, 0.2])
        >>> sampler = q[3:4].log()[None], torch.arange(4).view(1, 1, 4), q.log().view(1, 1, 4)
        >>> ids, mask, advantages = torch.tensor([[3]]), torch.ones(1, 1), torch.ones(1)
        >>> loss, metrics = loss_function(hidden, weight, ids, mask, advantages, *sampler)
        >>> loss.backward()
        >>> weight.grad[:, 0]  # -(onehot - q)
        tensor([ 0.4000,  0.2000,  0.2000, -0.8000])
    """

    def __init__(
        self,
        score_center: bool = True,
        correction: ISCorrection | None = None,
        temperature: float = 1.0,
        eps: float = 1e-6,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        if eps != 1e-6:
            raise NotImplementedError(f"eps must be 1e-6, got {eps}")
        self.score_center, self.correction, self.temperature = score_center, correction, temperature
        self.eps, self.chunk_size = eps, chunk_size
        corrections = (None,) if correction is None else ISCorrection(*correction).corrections()
        self.objectives = [
            fastrl.Objective.preset("reinforce", rollout_correction=one, score_centering=True)
            for one in corrections
        ]

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        sampler_token_logps: Tensor,
        sampler_topk_ids: Tensor,
        sampler_topk_logps: Tensor,
        bias: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and the metrics `entropy`, `kl_head` and `frac_masked`.

        Args:
            _input: last hidden states, `[B, T, H]`.
            lin_weight: weight of the LM head, `[V, H]`.
            selected_token_ids: integers `[B, T]`: the sampled tokens.
            attention_mask: `[B, T]`, nonzero for the tokens that count.
            advantages: `[B]` or `[B, T]`.
            sampler_token_logps: log-probabilities of sampled tokens under the sampler, `[B, T]`.
            sampler_topk_ids: the sampler's most likely tokens, `[B, T, K]`.
            sampler_topk_logps: their log-probabilities, `[B, T, K]`.
            bias: `[V]`, or None.
            num_items_in_batch: tokens of the whole batch on all ranks, or None.
        """
        mask = attention_mask != 0
        per_token = advantages.reshape(len(mask), -1).expand(mask.shape)
        masks = [mask]
        if len(self.objectives) == 2:
            masks = [mask & (per_token >= 0), mask & (per_token < 0)]

        def losses(score_centering: bool) -> list[fastrl.PolicyLoss]:
            top = fastrl.TopKLogprobs(sampler_topk_ids, sampler_topk_logps)
            return [
                fastrl.linear_policy_loss(
                    _input,
                    lin_weight,
                    selected_token_ids,
                    per_token,
                    some,
                    bias=bias,
                    temperature=self.temperature,
                    rollout_logprobs=sampler_token_logps if one.rollout_correction else None,
                    rollout_top_k=top if score_centering else None,
                    objective=dataclasses.replace(one, score_centering=score_centering),
                    normalizer=tokens_of_rank(mask, num_items_in_batch),
                )
                for one, some in zip(self.objectives, masks, strict=True)
            ]

        results = found = losses(self.score_center)
        if not self.score_center:  # the metrics are of the term
            with torch.no_grad():
                found = losses(True)
        counts = torch.stack([one.metrics["active_tokens"] for one in found])

        def mean(name: str) -> Tensor:
            values = torch.stack([one.metrics[name] for one in found])
            return (counts * values).sum() / counts.sum().clamp(min=1)

        names = {"entropy": "entropy", "kl_head": "head_kl", "frac_masked": "zero_weight_fraction"}
        loss = torch.stack([one.loss for one in results]).sum()
        return loss, {name: mean(ours) for name, ours in names.items()}
