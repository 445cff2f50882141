"""OpenRLHF's `PolicyLoss` and `ValueLoss`."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

import fastrl
from fastrl import Objective
from fastrl.integrations.openrlhf.correction import RolloutGate
from fastrl.objective.presets import Preset


class PolicyLoss(nn.Module):
    """OpenRLHF's `PolicyLoss` on `policy_loss`: PPO (arXiv 1707.06347) with dual clip, or GSPO.

        f = -min(r A, clip(r, 1 - clip_eps_low, 1 + clip_eps_high) A)

    For A < 0 it is at most -dual_clip A, and it is multiplied by the rollout correction. For GSPO
    (arXiv 2507.18071) r is the geometric mean over the sequence.

    With the arguments of OpenRLHF 0.11.2, `forward` returns (loss, clip_ratio, ppo_kl, vllm_kl,
    is_filter_ratio); with the arguments of 0.11.0 (`enable_vllm_is_correction=...`) it returns the
    first four.

    Args:
        clip_eps_low: distance of the lower bound from 1.
        clip_eps_high: distance of the upper bound from 1.
        dual_clip: upper bound c > 1 of the loss for negative advantages, or None.
        token_level_loss: whether to average over tokens; False averages over sequences of token
            means, and so does gspo always.
        policy_loss_type: `ppo` or `gspo`.
        is_correction_level: `off`, `token` or `seq`: whether the threshold of the rollout
            correction applies to tokens or sequences.
        is_correction_mode: `mask` drops the tokens outside the threshold, `clip` clips them.
        is_correction_gating: the compared quantity, `ratio`, `binary_kl` or `tv`.
        is_correction_threshold: the bounds (low, high).
        enable_vllm_is_correction: the option of 0.11.0 for `is_correction_level`.
        vllm_is_truncated_threshold: the option of 0.11.0 for the bounds (low, high).
        vllm_is_correction_type: the option of 0.11.0 for the kind: `tis`, `icepop` or
            `seq-mask-tis`.

    Raises:
        ValueError: an option is invalid, or two options conflict.
        TypeError: options of 0.11.0 are not passed by keyword.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.openrlhf import PolicyLoss
        >>> old, mask = torch.zeros(1, 2), torch.ones(1, 2)
        >>> loss, clip_ratio, *_ = PolicyLoss()(torch.tensor([[0.5, 0.0]]), old, mask, mask)
        >>> loss, clip_ratio
        (tensor(-1.1000), tensor(0.5000))
    """

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str = "off",
        is_correction_mode: str = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: tuple[float, float] = (0.5, 5.0),
        *,
        enable_vllm_is_correction: bool | None = None,
        vllm_is_truncated_threshold: tuple[float, float] | None = None,
        vllm_is_correction_type: str = "tis",
    ) -> None:
        super().__init__()
        if policy_loss_type not in ("ppo", "gspo"):
            raise ValueError(f"policy_loss_type must be ppo or gspo, got {policy_loss_type!r}")
        self.policy_loss_type = policy_loss_type
        self.token_level_loss = token_level_loss and policy_loss_type == "ppo"
        if isinstance(is_correction_level, bool):  # in this place 0.11.0 has another argument
            raise TypeError(
                "is_correction_level must be off, token or seq; pass enable_vllm_is_correction by "
                "keyword"
            )
        self.as_in_0_11_0 = enable_vllm_is_correction is not None
        if enable_vllm_is_correction is None:
            self.gate = RolloutGate(
                is_correction_level,
                is_correction_mode,
                is_correction_gating,
                is_correction_threshold,
            ).checked()
        else:
            self.gate = RolloutGate.of_0_11_0(
                enable_vllm_is_correction, vllm_is_truncated_threshold, vllm_is_correction_type
            )
        # without KL and entropy, which the trainer adds itself
        self.objective = Objective.preset(
            cast("Preset", policy_loss_type),
            convention="openrlhf",
            clip_low=min(clip_eps_low, 1.0),  # a ratio is never below 0
            clip_high=clip_eps_high,
            dual_clip=dual_clip,
            aggregation=_aggregation(self.token_level_loss),
        )

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return (loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio); the last two may be None.

        Args:
            log_probs: log-probabilities under the policy in nats, `[B, T]`.
            old_log_probs: log-probabilities under the old policy, computed by the trainer,
                `[B, T]`.
            advantages: `[B, T]`.
            action_mask: 0/1, `[B, T]`; None means all ones.
            rollout_log_probs: log-probabilities under the old policy, computed by the rollout
                engine, `[B, T]`.
            dp_size: the number of ranks over which gradients are averaged.
            batch_num_tokens: the number of tokens in the global batch; None counts this batch.
            global_batch_size: the number of sequences in the global batch; None counts this batch.
        """
        mask = torch.ones_like(log_probs) if action_mask is None else action_mask
        if self.gate.level != "off" and rollout_log_probs is None:
            raise ValueError("rollout_log_probs is needed for the rollout correction")
        old, weights, vllm_kl, filtered = old_log_probs, None, None, None
        if self.gate.level != "off" and rollout_log_probs is not None:
            if self.policy_loss_type == "ppo":
                weights, vllm_kl, filtered = self.gate.weigh(old, rollout_log_probs, mask)
            else:
                old = rollout_log_probs
        loss = fastrl.policy_loss(
            log_probs,
            advantages,
            mask,
            old_logprobs=old,
            policy_weights=weights,
            objective=self.objective,
            normalizer=_normalizer(
                self.token_level_loss, dp_size, batch_num_tokens, global_batch_size
            ),
        ).loss
        with torch.no_grad():
            clip = fastrl.clipped_tokens(
                log_probs, advantages, mask, old_logprobs=old, objective=self.objective
            )
            clipped = clip * advantages > 0  # not by the dual clip
            clip_ratio = fastrl.masked_mean(clipped.to(log_probs.dtype), mask)
            ppo_kl = fastrl.masked_mean(old_log_probs - log_probs, mask)
        found = (loss, clip_ratio, ppo_kl, vllm_kl, filtered)
        return found[:4] if self.as_in_0_11_0 else found


class ValueLoss(nn.Module):
    """OpenRLHF's `ValueLoss` on `value_loss`.

        max((V - R)^2, (V_old + clip(V - V_old, -clip_eps, clip_eps) - R)^2) / 2

    Without `clip_eps` it is (V - R)^2 / 2.

    Args:
        clip_eps: the clip range of the values, or None.
        token_level_loss: whether to average over tokens; False averages over sequences of token
            means.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.openrlhf import ValueLoss
        >>> one = torch.ones(1, 2)
        >>> ValueLoss(clip_eps=0.5)(2 * one, one, 0 * one, one)
        tensor(2.)
    """

    def __init__(self, clip_eps: float | None = None, token_level_loss: bool = True) -> None:
        super().__init__()
        self.clip_eps = clip_eps
        self.token_level_loss = token_level_loss

    def forward(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> Tensor:
        """Return the loss; `PolicyLoss` describes the arguments."""
        return fastrl.value_loss(
            values,
            returns,
            torch.ones_like(values) if action_mask is None else action_mask,
            old_values=None if self.clip_eps is None else old_values,
            clip=self.clip_eps,
            aggregation=_aggregation(self.token_level_loss),
            normalizer=_normalizer(
                self.token_level_loss, dp_size, batch_num_tokens, global_batch_size
            ),
        ).loss


def _aggregation(token_level_loss: bool) -> Literal["token-mean", "seq-mean-token-mean"]:
    return "token-mean" if token_level_loss else "seq-mean-token-mean"


def _normalizer(
    token_level_loss: bool,
    dp_size: int,
    batch_num_tokens: float | None,
    global_batch_size: float | None,
) -> float | None:
    count = batch_num_tokens if token_level_loss else global_batch_size
    return None if count is None else count / dp_size
