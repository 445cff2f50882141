"""The weights of each term of the loss: aggregation, rollout corrections, masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import AggregationArguments, LossArguments
from fastrl.objective import Objective
from fastrl.objective.rollout_correction import RolloutCorrection
from fastrl.ops.token_weights import aggregation_arguments, sequence_weights

TERMS = ("policy", "kl", "entropy")

#: A global denominator: one for all terms, or one for each term with a separate aggregation.
Normalizer = float | Tensor | Mapping[str, float | Tensor]


class TermAggregations(NamedTuple):
    """The aggregation of each term; None means the same as the policy term."""

    policy: AggregationArguments
    kl: AggregationArguments | None
    entropy: AggregationArguments | None


def term_aggregations(
    objective: Objective,
    tokens: Tensor,
    cu_seqlens: Tensor | None,
    *,
    normalizer: object,
    group_size: object,
    group_ids: object,
) -> TermAggregations:
    """Check the aggregation of each term for `tokens` `[B, T]` or packed `[N]`."""
    o = objective
    aggregations = (o.aggregation, o.kl_aggregation, o.entropy_aggregation)
    normalizers = _normalizers(normalizer, o)
    # groups are for prompt-mean; if no term uses it, the check of the policy term must reject them
    unused_groups = "prompt-mean" not in aggregations

    def arguments(term: int) -> AggregationArguments:
        aggregation = aggregations[term]
        assert aggregation is not None
        grouped = aggregation == "prompt-mean" or (term == 0 and unused_groups)
        return aggregation_arguments(
            tokens,
            cu_seqlens,
            aggregation=aggregation,
            normalizer=normalizers[term],
            length_norm=o.length_norm if aggregation == "seq-mean-token-sum-norm" else None,
            group_size=group_size if grouped else None,
            group_ids=group_ids if grouped else None,
            count_empty=o.count_empty and aggregation.startswith("seq-mean"),
        )

    return TermAggregations(
        arguments(0),
        arguments(1) if o.kl_coef and o.kl_aggregation else None,
        arguments(2) if o.entropy_coef and o.entropy_aggregation else None,
    )


def term_weights(
    mask: Tensor,
    cu_seqlens: Tensor | None,
    aggregations: TermAggregations,
    backend: str,
    token_ids: Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return weights `[S]` for policy, KL and entropy (None: as for policy), and active tokens."""
    weights, active = sequence_weights(
        mask, cu_seqlens, aggregations.policy, backend, token_ids, ignore_index, dtype
    )

    def separate(how: AggregationArguments | None) -> Tensor | None:
        if how is None:
            return None
        return sequence_weights(active, cu_seqlens, how, backend, dtype=dtype)[0]

    return weights, separate(aggregations.kl), separate(aggregations.entropy), active


class WeightCorrections(NamedTuple):
    """Rollout corrections and token masks of an objective, which change the weights per token."""

    objective: Objective
    rollout_corrections: tuple[RolloutCorrection, ...]
    rollout_logprobs: Tensor | None
    entropy_aggregation: AggregationArguments | None

    def without_sampled(self) -> WeightCorrections:
        """Return those that do not depend on which token was sampled at a place."""
        of_sequences = tuple(c for c in self.rollout_corrections if c.level != "token")
        return self._replace(rollout_corrections=of_sequences)

    # not a property: torch.compile in torch 2.10 cannot trace properties of a NamedTuple
    def need_logprobs(self, arguments: LossArguments) -> bool:
        """Return whether the weights depend on the current log-probabilities or entropies."""
        o = self.objective
        if arguments.old_logprobs is None:
            by_old = len(self.rollout_corrections) > 0  # torch 2.10 cannot trace bool of it
        else:
            by_old = o.trust_region is not None or o.gamma_weights is not None
        return by_old or o.off_policy_threshold is not None or o.top_entropy_quantile < 1

    def apply(
        self,
        arguments: LossArguments,
        active: Tensor,
        logprobs: Tensor,
        entropy: Tensor | None,
    ) -> LossArguments:
        """Return the arguments with corrections and masks applied to the weights, `[B, T]`.

        The values of `logprobs` and `entropy` have no effect unless the weights `need_logprobs`.
        """
        o = self.objective
        entropy_mask = o.top_entropy_quantile < 1 and entropy is not None
        on_policy = arguments.old_logprobs is None  # ratio 1
        region = None if on_policy else o.trust_region
        gamma = None if on_policy and not self.rollout_corrections else o.gamma_weights
        of_tokens = (o.off_policy_threshold, region, gamma)
        if not (self.rollout_corrections or entropy_mask or any(x is not None for x in of_tokens)):
            return arguments
        sequences = reference.sequences_of(active, arguments.cu_seqlens)

        def per_token(constant: Tensor) -> Tensor:
            return torch.where(active, sequences.per_token(constant, active), 0.0)

        kl_weights, entropy_weights = arguments.kl_weights, arguments.entropy_weights
        old = logprobs if arguments.old_logprobs is None else arguments.old_logprobs
        sampled = old if self.rollout_logprobs is None else self.rollout_logprobs
        policy_weights = torch.ones_like(active, dtype=arguments.weights.dtype)
        factors_of_w = policy_weights
        if arguments.policy_weights is not None:
            policy_weights = per_token(arguments.policy_weights)
        for correction in self.rollout_corrections:
            ratio = reference.rollout_correction(old, sampled, active, sequences, correction)
            if gamma is not None and correction.kind != "filter":
                factors_of_w = factors_of_w * ratio
            else:
                policy_weights = policy_weights * ratio
            if o.rollout_weighs == "policy-and-kl" and o.kl_coef:
                kl_weights = arguments.weights if kl_weights is None else kl_weights
                kl_weights = per_token(kl_weights) * ratio
        advantages, drops = per_token(arguments.advantages), []
        if gamma is not None:
            policy_weights = policy_weights * reference.gamma_weights(
                logprobs, old, factors_of_w, advantages, active, sequences, gamma
            )
        if region is not None:
            drops.append(reference.outside_trust_region(logprobs, old, advantages, active, region))
        if o.off_policy_threshold is not None:
            threshold = o.off_policy_threshold
            drops.append(
                reference.off_policy(logprobs, sampled, advantages, active, sequences, threshold)
            )
        for dropped in drops:
            policy_weights = torch.where(dropped, 0.0, policy_weights)
        if entropy_mask and entropy is not None:
            kept = reference.top_entropy(entropy, active, o.top_entropy_quantile)
            policy_weights = torch.where(kept, policy_weights, 0.0)
            how = self.entropy_aggregation
            if o.entropy_coef and how is None:
                entropy_weights = torch.where(kept, per_token(arguments.weights), 0.0)
            elif o.entropy_coef and how is not None:
                dtype = policy_weights.dtype
                entropy_weights = reference.token_weights(kept, sequences, how, dtype)
        return arguments._replace(
            policy_weights=policy_weights.contiguous(),
            kl_weights=kl_weights,
            entropy_weights=entropy_weights,
        )


def _normalizers(normalizer: object, o: Objective) -> tuple[object, object, object]:
    """Return the global denominator of each term."""
    shared = o.kl_aggregation is None and o.entropy_aggregation is None
    if shared and not isinstance(normalizer, Mapping):
        return normalizer, None, None
    separate = ["policy"]
    separate += ["kl"] if o.kl_coef and o.kl_aggregation else []
    separate += ["entropy"] if o.entropy_coef and o.entropy_aggregation else []
    if isinstance(normalizer, Mapping):
        if not normalizer:
            raise ValueError(
                "normalizer must contain the count of at least one of "
                f"{', '.join(separate)} if it is a mapping, got none"
            )
        for name in normalizer:
            if name not in separate:
                raise ValueError(
                    "normalizer must have keys among the terms with separate aggregations, "
                    f"{', '.join(separate)}; got {name!r}"
                )
        policy, kl, entropy = (normalizer.get(name) for name in TERMS)
        return policy, kl, entropy
    if normalizer is not None and len(separate) > 1:
        raise ValueError(
            f"normalizer must be a mapping with keys among {', '.join(separate)} (missing: the "
            "local count), which have separate aggregations in objective; "
            f"got {type(normalizer).__name__}"
        )
    return normalizer, None, None
