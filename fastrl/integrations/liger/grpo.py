"""Liger's `LigerFusedLinearGRPOLoss` on fastrl."""

from __future__ import annotations

import dataclasses
import math
import warnings

import torch
from torch import Tensor, nn

import fastrl
from fastrl.integrations.formulas import LOSS_TYPES, trl_objective


class LigerFusedLinearGRPOLoss(nn.Module):
    """GRPO and its variants from hidden states and LM head, with Liger's arguments and results.

    `linear_policy_loss` computes the losses of Liger's `LigerFusedLinearGRPOLoss` (arXiv
    2410.10989). `Objective.preset` names the papers.

    | loss_type | loss of a token | aggregation |
    | --- | --- | --- |
    | `grpo` | `-min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)` | mean over B of the token means |
    | `bnpo` | the same | mean over the tokens of the batch |
    | `dr_grpo` | the same | sum / (B max_completion_length) |
    | `dapo` | the same | sum / (num_items_in_batch / ranks), or by default sum / (tokens of all ranks / ranks) |
    | `luspo` | the same | mean over B of the token sums |
    | `cispo` | `-sg[min(r, epsilon_high)] A logprob` | as dapo |
    | `sapo` | `-4/tau sigmoid(tau (r - 1)) A` | as grpo |
    | `vespo` | `-phi A logprob`, phi of `fastrl.GammaWeights` | as dapo |

    Args:
        beta: weight of the KL (k3) to the reference.
        compiled: ignored.
        use_ref_model: whether there is a reference policy; without one the KL is 0.
        chunk_size: ignored.
        epsilon_low: distance of the lower bound from 1.
        epsilon_high: distance of the upper bound from 1; for cispo the upper bound itself.
        loss_type: a row of the table.
        max_completion_length: the divisor of `dr_grpo`, in tokens.
        importance_sampling_level: `token` or `sequence`.
        sapo_temperature_pos: tau for positive advantages.
        sapo_temperature_neg: tau for all other advantages.
        temperature: divides the logits.
        delta: upper bound of the unclipped ratio, or None.
        use_bias_correction_kl: multiply the KL by the ratio (DeepSeek-V3.2).
        vespo_k_pos: exponent of vespo's weights for advantages of at least 0.
        vespo_lambda_pos: decay of vespo's weights for advantages of at least 0.
        vespo_k_neg: exponent of vespo's weights for negative advantages.
        vespo_lambda_neg: decay of vespo's weights for negative advantages.

    Raises:
        ValueError: an option is invalid or missing, or two options conflict.
        NotImplementedError: Liger supports the option, but fastrl does not.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.liger import LigerFusedLinearGRPOLoss
        >>> loss_function = LigerFusedLinearGRPOLoss(beta=0.0)
        >>> hidden, weight = torch.ones(1, 2, 3), torch.zeros(4, 3, requires_grad=True)
        >>> ids, mask, advantages = torch.tensor([[0, 3]]), torch.ones(1, 2), torch.ones(1)
        >>> loss, (clip_ratio,) = loss_function(hidden, weight, ids, mask, advantages)
        >>> loss.backward()
        >>> loss.item(), clip_ratio.item(), weight.grad[:, 0].tolist()
        (-1.0, 0.0, [-0.25, 0.25, 0.25, -0.25])
    """  # noqa: E501

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        del compiled, chunk_size
        _refuse(loss_type, importance_sampling_level, beta, max_completion_length)
        gamma_weights = None
        if loss_type == "vespo":
            gamma_weights = fastrl.GammaWeights(
                k_pos=vespo_k_pos,
                lambda_pos=vespo_lambda_pos,
                k_neg=vespo_k_neg,
                lambda_neg=vespo_lambda_neg,
            )
        self.beta, self.loss_type, self.temperature = beta, loss_type, temperature
        self.use_ref_model = use_ref_model
        self.objective = trl_objective(
            loss_type,
            level=importance_sampling_level,
            epsilon_low=min(epsilon_low, 1.0),  # a ratio is never below 0
            epsilon_high=epsilon_high,
            delta=delta,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            # without a reference Liger uses the policy itself: a KL of 0 without gradient
            beta=beta if use_ref_model else 0.0,
            bias_correction=use_bias_correction_kl,
            max_completion_length=max_completion_length,
            gamma_weights=gamma_weights,
        )

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss and the metrics: the mean KL if beta is not 0, and the clip ratio.

        If both `ref_per_token_logps` and `ref_input` are given, the first is used, with a warning.

        Args:
            _input: last hidden states, `[B, T, H]`.
            lin_weight: weight of the LM head, `[V, H]`.
            selected_token_ids: integers `[B, T]`: the token that each position predicts.
            attention_mask: 0/1, `[B, T]`: the tokens that count.
            advantages: one per sequence, `[B]`.
            bias: `[V]`, or None.
            ref_per_token_logps: log-probabilities under the reference policy in nats, `[B, T]`, or
                None.
            old_per_token_logps: log-probabilities under the old policy, `[B, T]`; None means on
                policy.
            ref_input: last hidden states of the reference, `[B, T, H]`, which replace its
                log-probabilities.
            ref_weight: weight of the reference's head, `[V, H]`.
            ref_bias: bias of the reference's head, `[V]`, or None.
            vllm_is_ratio: `[B, T]`, `[B, 1]` or `[B]`, factors of the policy term, or None. With
                vespo it must be `[B, T]`, and holds factors of the sequence's ratio.
            num_items_in_batch: tokens of the whole batch on all ranks, for dapo, cispo and vespo.
        """
        ids, mask = selected_token_ids, attention_mask
        if self.use_ref_model and ref_per_token_logps is not None and ref_input is not None:
            warnings.warn(
                "ref_per_token_logps and ref_input are both given. Using ref_per_token_logps.",
                stacklevel=4,  # nn.Module's frames are in between
            )
        reference = None
        if self.objective.kl_coef:
            reference = ref_per_token_logps
            if reference is None:
                reference = self._reference(ids, mask, ref_input, ref_weight, ref_bias)
        factors = rollout_logprobs = None
        objective = self.objective
        if vllm_is_ratio is not None:
            factors = self._factors(vllm_is_ratio, ids)
            if objective.gamma_weights:  # the ratios enter these instead of multiplying the loss
                if old_per_token_logps is None:
                    raise NotImplementedError(
                        "old_per_token_logps is needed with vllm_is_ratio and loss_type vespo, "
                        "got None"
                    )
                rollout_logprobs, factors = old_per_token_logps - factors.log(), None
                ratios = fastrl.RolloutCorrection(kind="truncate", high=math.inf)
                objective = dataclasses.replace(objective, rollout_correction=ratios)
        result = fastrl.linear_policy_loss(
            _input,
            lin_weight,
            ids,
            advantages,
            mask,
            bias=bias,
            temperature=self.temperature,
            old_logprobs=old_per_token_logps,
            ref_logprobs=reference,
            rollout_logprobs=rollout_logprobs,
            policy_weights=factors,
            objective=objective,
            normalizer=self._normalizer(mask, num_items_in_batch),
        )
        clip = fastrl.clipped_tokens(
            result.logprobs,
            advantages,
            mask,
            old_logprobs=old_per_token_logps,
            objective=self.objective,
        )
        clipped = clip * advantages[:, None] > 0  # not by `delta`
        clip_ratio = fastrl.masked_mean(clipped.to(result.logprobs.dtype), mask)
        if not self.beta:
            return result.loss, (clip_ratio,)
        without = torch.zeros_like(clip_ratio)  # a reference
        return result.loss, (result.metrics.get("kl", without), clip_ratio)

    def _reference(
        self,
        ids: Tensor,
        mask: Tensor,
        hidden: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        if hidden is None or weight is None:
            raise ValueError(
                "ref_per_token_logps, or ref_input with ref_weight, is needed if beta is not 0 and "
                "use_ref_model is True"
            )
        with torch.no_grad():
            return fastrl.linear_token_logprobs(
                hidden, weight, ids, bias=bias, mask=mask, temperature=self.temperature
            )

    def _factors(self, ratio: Tensor, ids: Tensor) -> Tensor:
        """Return a ratio per token from ratios per token or per sequence."""
        sequences, tokens = ids.shape
        if ratio.shape not in ((sequences,), (sequences, 1), (sequences, tokens)):
            raise ValueError(
                f"vllm_is_ratio must have shape ({sequences},), ({sequences}, 1) or "
                f"({sequences}, {tokens}), got {tuple(ratio.shape)}"
            )
        ratio = ratio.reshape(sequences, -1)
        only = {"luspo": ("[B] or [B, 1]", 1), "vespo": ("[B, T]", tokens)}.get(self.loss_type)
        if only and ratio.shape[1] != only[1]:
            raise NotImplementedError(
                f"vllm_is_ratio must have shape {only[0]} with loss_type {self.loss_type}, "
                f"got {tuple(ratio.shape)}"
            )
        return ratio.expand(ids.shape)

    def _normalizer(self, mask: Tensor, count: float | Tensor | None) -> Tensor | None:
        if self.loss_type not in ("dapo", "cispo", "vespo"):
            return None
        return tokens_of_rank(mask, count)


def _refuse(loss_type: str, level: str, beta: float, max_completion_length: int | None) -> None:
    """Raise for options that Liger refuses, with its message if any, and that fastrl lacks."""
    if level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
        raise ValueError(
            f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}: "
            "importance_sampling_level must be 'token', got 'sequence'"
        )
    names = (*LOSS_TYPES, "vespo")
    if loss_type not in names:
        raise ValueError(f"loss_type must be one of {', '.join(names)}; got {loss_type!r}")
    if level not in ("token", "sequence"):
        raise ValueError(f"importance_sampling_level must be token or sequence, got {level!r}")
    if loss_type == "luspo" and (level == "token" or beta):
        raise NotImplementedError(
            "loss_type luspo needs importance_sampling_level sequence and beta 0: otherwise "
            f"Liger averages over padding; got {level} and {beta}"
        )
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ValueError("max_completion_length is needed with loss_type dr_grpo, got None")


def tokens_of_rank(mask: Tensor, count: float | Tensor | None) -> Tensor:
    """Return the tokens of the batch divided by the number of ranks; `count` is of all ranks."""
    ranks, several = 1, torch.distributed.is_available() and torch.distributed.is_initialized()
    if several:
        ranks = torch.distributed.get_world_size()
    if count is None:
        tokens = mask.sum(dtype=torch.float32)
        if several:
            torch.distributed.all_reduce(tokens)
    else:
        tokens = torch.as_tensor(count, dtype=torch.float32, device=mask.device)
    return (tokens / ranks).clamp(min=1.0)
