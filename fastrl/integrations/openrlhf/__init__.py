"""OpenRLHF's losses and advantages, under the same names.

    from fastrl.integrations.openrlhf import PolicyLoss  # in openrlhf/trainer/ray/ppo_actor.py
    from fastrl.integrations.openrlhf import ValueLoss  # in openrlhf/trainer/ray/ppo_critic.py
    from fastrl.integrations.openrlhf import log_probs_from_logits  # in openrlhf/models/actor.py

Each of these replaces the import of the same name in that file.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

import fastrl
from fastrl import Objective
from fastrl.integrations.formulas import kl_estimate, straight_through, within_bounds
from fastrl.integrations.openrlhf.correction import RolloutGate
from fastrl.objective.presets import Preset

#: Bound of the KL estimate of a token, and of the weight of `unbiased_gradient`.
_KL_CLAMP = 10.0


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
        self.clip_range = (1 - clip_eps_low, 1 + clip_eps_high)

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
            log_ratio = log_probs - old
            if self.policy_loss_type == "ppo":
                ratio = within_bounds(log_ratio, self.objective).exp()
            else:
                ratio = fastrl.masked_mean(log_ratio, mask, dim=-1).exp()[:, None]
            clipped = ratio.clamp(*self.clip_range) * advantages < ratio * advantages
            clip_ratio = fastrl.masked_mean(clipped.to(log_ratio.dtype), mask)
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


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities of labels, log softmax(logits / temperature)[label].

    `token_logprobs` computes them and leaves the logits as they are; OpenRLHF's function divides
    the logits by the temperature in place.

    Args:
        logits: `[..., V]`.
        labels: integers `[...]`: the token that each position predicts.
        temperature: above 0.

    Returns:
        Log-probabilities in nats, fp32, `[...]`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a label is outside the vocabulary, or the temperature is not above 0.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.openrlhf import log_probs_from_logits
        >>> log_probs_from_logits(torch.zeros(1, 4), torch.tensor([2]))
        tensor([-1.3863])
    """
    rows = logits if logits.dim() in (2, 3) else logits.reshape(-1, logits.shape[-1])
    found = fastrl.token_logprobs(rows, labels.reshape(rows.shape[:-1]), temperature=temperature)
    return found.reshape(labels.shape)


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    log_probs_old: Tensor | None = None,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
) -> Tensor:
    """Return a KL estimate per token, k1, k2 or k3 of `kl_divergence`, clamped to +-10.

    Args:
        log_probs: log-probabilities under the policy in nats, of any shape.
        log_probs_base: log-probabilities under the reference policy, of the same shape.
        log_probs_old: log-probabilities under the policy that sampled, of the same shape, or None.
        kl_estimator: `k1`, `k2` or `k3`.
        unbiased_gradient: whether to keep the value, but take the gradient of w k2 with the
            detached weight w = min(exp(log_probs - log_probs_old), 10), whose expectation is the
            gradient of the KL.

    Returns:
        The estimates in nats, fp32, the shape of `log_probs`.

    Raises:
        TypeError: `kl_estimator` is passed by position, as in OpenRLHF before `log_probs_old`.
        ValueError: `kl_estimator` is none of the three.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.openrlhf import compute_approx_kl
        >>> compute_approx_kl(torch.tensor([-1.0]), torch.tensor([-2.0]), kl_estimator="k2")
        tensor([0.5000])
    """
    if isinstance(log_probs_old, str):
        raise TypeError("log_probs_old must be a tensor or None; pass kl_estimator by keyword")
    if kl_estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"kl_estimator must be one of k1, k2, k3; got {kl_estimator!r}")
    value = kl_estimate(log_probs, log_probs_base, kl_estimator).clamp(-_KL_CLAMP, _KL_CLAMP)
    if not unbiased_gradient:
        return value
    slope = kl_estimate(log_probs, log_probs_base, "k2")
    if log_probs_old is not None:
        weight = (log_probs.detach().float() - log_probs_old.detach().float()).exp()
        slope = slope * weight.clamp(max=_KL_CLAMP)
    return straight_through(value, slope)


def get_advantages_and_returns(
    values: Tensor,
    rewards: Tensor,
    action_mask: Tensor | None,
    gamma: float,
    lambd: float,
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of OpenRLHF's experience maker, by `gae`.

    Masked tokens count as steps with reward 0 and value 0, while `gae` with a mask (and verl)
    skips them: the results differ if a mask has gaps.

    Args:
        values: `[B, T]`.
        rewards: `[B, T]`.
        action_mask: 0/1, `[B, T]`; None means all ones.
        gamma: discount per token, in [0, 1].
        lambd: trace decay per token, in [0, 1].

    Returns:
        Advantages and returns, fp32 `[B, T]`, without gradient.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `values` and `rewards` differ in shape, or gamma or lambd is outside [0, 1].

    Examples:
        >>> import torch
        >>> from fastrl.integrations.openrlhf import get_advantages_and_returns
        >>> rewards, mask = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[1, 0, 1]])
        >>> get_advantages_and_returns(torch.zeros(1, 3), rewards, mask, 0.5, 1.0)[1]
        tensor([[0.2500, 0.5000, 1.0000]])
    """
    if action_mask is not None:
        values, rewards = (torch.where(action_mask.bool(), x, 0.0) for x in (values, rewards))
    found = fastrl.gae(rewards, values, gamma=float(gamma), lam=float(lambd))
    return found.advantages, found.returns


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
