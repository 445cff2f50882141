"""The weights of the terms of the loss: aggregation, rollout corrections, masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import AggregationArguments, LossArguments
from fastrl.objective import Objective
from fastrl.ops.token_weights import aggregation_arguments, sequence_weights

TERMS = ("policy", "kl", "entropy")

#: a global denominator: one for all terms, or one for each that is averaged in its own way
Normalizer = float | Tensor | Mapping[str, float | Tensor]


class TermAggregations(NamedTuple):
    """How the tokens of each term are averaged; None: like those of the policy term."""

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
    """Check how the terms of the loss of `tokens` `[B, T]` or packed `[N]` are averaged."""
    o = objective
    aggregations = (o.aggregation, o.kl_aggregation, o.entropy_aggregation)
    normalizers = _normalizers(normalizer, o)
    # whichever aggregation takes no groups must not see any, but the policy's refuses stray ones
    strays = "prompt-mean" not in aggregations

    def arguments(term: int) -> AggregationArguments:
        aggregation = aggregations[term]
        assert aggregation is not None
        grouped = aggregation == "prompt-mean" or (term == 0 and strays)
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
    """Return the weights of every sequence in each term (None: as policy), and the valid tokens."""
    weights, active = sequence_weights(
        mask, cu_seqlens, aggregations.policy, backend, token_ids, ignore_index, dtype
    )

    def own(how: AggregationArguments | None) -> Tensor | None:
        if how is None:
            return None
        return sequence_weights(active, cu_seqlens, how, backend, dtype=dtype)[0]

    return weights, own(aggregations.kl), own(aggregations.entropy), active


class TermMasks(NamedTuple):
    """What weighs the tokens of a term beyond its aggregation: corrections and masks."""

    objective: Objective
    active: Tensor  # bool [B, T]
    rollout_logprobs: Tensor | None
    entropy_aggregation: AggregationArguments | None

    # no property: torch.compile of torch 2.10 traces none of a NamedTuple
    def wait(self, arguments: LossArguments) -> bool:
        """Say whether the weights are known only after the current log-probabilities."""
        o = self.objective
        on_policy = arguments.old_logprobs is None and bool(o.rollout_corrections)
        return on_policy or o.off_policy_threshold is not None or o.top_entropy_quantile < 1

    def apply(
        self, arguments: LossArguments, logprobs: Tensor, entropy: Tensor | None
    ) -> LossArguments:
        """Return the arguments with the factors of corrections and masks, `[B, T]`.

        Neither tensor is read unless the weights `wait` for it.
        """
        o, active = self.objective, self.active
        top = o.top_entropy_quantile < 1 and entropy is not None
        if not (o.rollout_corrections or o.off_policy_threshold is not None or top):
            return arguments
        sequences = reference.sequences_of(active, arguments.cu_seqlens)

        def per_token(constant: Tensor) -> Tensor:
            return torch.where(active, sequences.per_token(constant, active), 0.0)

        kl, bonus = arguments.kl_weights, arguments.entropy_weights
        old = logprobs if arguments.old_logprobs is None else arguments.old_logprobs
        sampled = old if self.rollout_logprobs is None else self.rollout_logprobs
        factors = torch.ones_like(active, dtype=arguments.weights.dtype)
        if arguments.policy_weights is not None:
            factors = per_token(arguments.policy_weights)
        for correction in o.rollout_corrections:
            ratio = reference.rollout_correction(old, sampled, active, sequences, correction)
            factors = factors * ratio
            if o.rollout_weighs == "policy-and-kl" and o.kl_coef:
                kl = per_token(arguments.weights if kl is None else kl) * ratio
        if o.off_policy_threshold is not None:
            advantages = per_token(arguments.advantages)
            gone = reference.off_policy(
                logprobs, sampled, advantages, active, sequences, o.off_policy_threshold
            )
            factors = torch.where(gone, 0.0, factors)
        if top and entropy is not None:
            kept = reference.top_entropy(entropy, active, o.top_entropy_quantile)
            factors = torch.where(kept, factors, 0.0)
            if o.entropy_coef and self.entropy_aggregation is None:
                bonus = torch.where(kept, per_token(arguments.weights), 0.0)
            elif o.entropy_coef and self.entropy_aggregation is not None:
                bonus = reference.token_weights(
                    kept, sequences, self.entropy_aggregation, factors.dtype
                )
        return arguments._replace(
            policy_weights=factors.contiguous(), kl_weights=kl, entropy_weights=bonus
        )


def _normalizers(normalizer: object, o: Objective) -> tuple[object, object, object]:
    """The global denominator of each term."""
    shared = o.kl_aggregation is None and o.entropy_aggregation is None
    if shared and not isinstance(normalizer, Mapping):
        return normalizer, None, None
    active = (True, bool(o.kl_coef), bool(o.entropy_coef))
    own = (True, o.kl_aggregation is not None, o.entropy_aggregation is not None)
    separate = [
        name for name, used, apart in zip(TERMS, active, own, strict=True) if used and apart
    ]
    if isinstance(normalizer, Mapping):
        if not normalizer:
            raise ValueError(
                "normalizer must hold the count of at least one of "
                f"{', '.join(separate)} where it is a mapping, got none"
            )
        for name in normalizer:
            if name not in separate:
                raise ValueError(
                    "normalizer must have keys among the terms that are added up in their own way, "
                    f"{', '.join(separate)}; got {name!r}"
                )
        policy, kl, entropy = (normalizer.get(name) for name in TERMS)
        return policy, kl, entropy
    if normalizer is not None and len(separate) > 1:
        raise ValueError(
            "normalizer must be a mapping, one for each of "
            f"{', '.join(separate)} (left out: the local count), where objective has aggregations "
            f"of their own for them; got {type(normalizer).__name__}"
        )
    return normalizer, None, None
