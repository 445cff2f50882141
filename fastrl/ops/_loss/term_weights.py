"""The weight of every token in each term of the loss: aggregation, corrections and masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.objective import Objective
from fastrl.ops.token_weights import weights_of
from fastrl.reference import Sequences

TERMS = ("policy", "kl", "entropy")

#: a global denominator: one for all terms, or one for each that is added up in its own way
Normalizer = float | Tensor | Mapping[str, float | Tensor]


class TermWeights(NamedTuple):
    """The weight of each token in each term of the loss; None is that of the policy term."""

    policy: Tensor
    kl: Tensor | None
    entropy: Tensor | None

    def counts(self) -> Tensor:
        """Say which tokens have a weight in any term."""
        return torch.stack([of_term != 0 for of_term in self if of_term is not None]).any(0)


class Weighing(NamedTuple):
    """What the weights are made of; all tensors are `[B, T]`."""

    objective: Objective
    mask: Tensor
    sequences: Sequences
    advantages: Tensor
    #: the plain weights of each term, by its aggregation
    base: TermWeights
    #: those of the entropy bonus, on fewer tokens than the mask has
    entropy_on: Callable[[Tensor], Tensor]
    policy_weights: Tensor | None
    old_logprobs: Tensor | None
    rollout_logprobs: Tensor | None

    # no property: torch.compile of torch 2.10 traces none of a NamedTuple
    def wait(self) -> bool:
        """Say whether the weights are known only after the current log-probabilities."""
        o = self.objective
        on_policy = self.old_logprobs is None and bool(o.rollout_corrections)
        return on_policy or o.off_policy_threshold is not None or o.top_entropy_quantile < 1

    def weights(self, logprobs: Tensor, entropy: Tensor | None) -> TermWeights:
        """Return the weights of each term; neither argument is looked at unless they `wait`."""
        o = self.objective
        policy = self.base.policy
        kl, bonus = (policy if own is None else own for own in self.base[1:])
        old = logprobs if self.old_logprobs is None else self.old_logprobs
        sampled = old if self.rollout_logprobs is None else self.rollout_logprobs
        for correction in o.rollout_corrections:
            factor = reference.rollout_correction(
                old, sampled, self.mask, self.sequences, correction
            )
            together = kl is policy
            policy = policy * factor
            if o.rollout_weighs == "policy-and-kl":
                kl = policy if together else kl * factor
        if self.policy_weights is not None:
            policy = policy * torch.where(self.mask, self.policy_weights, 0.0)
        if o.off_policy_threshold is not None:
            gone = reference.off_policy(
                logprobs,
                sampled,
                self.advantages,
                self.mask,
                self.sequences,
                o.off_policy_threshold,
            )
            policy = torch.where(gone, 0.0, policy)
        if o.top_entropy_quantile < 1 and entropy is not None:
            top = reference.top_entropy(entropy, self.mask, o.top_entropy_quantile)
            policy = torch.where(top, policy, 0.0)
            bonus = self.entropy_on(top) if o.entropy_coef else bonus
        return TermWeights(
            policy,
            kl if o.kl_coef and kl is not policy else None,
            bonus if o.entropy_coef and bonus is not policy else None,
        )


def base_weights(
    mask: Tensor,
    sequences: Sequences,
    objective: Objective,
    *,
    packed: bool,
    cut: bool,
    normalizer: object,
    group_size: object,
    group_ids: object,
    dtype: torch.dtype,
) -> tuple[TermWeights, Callable[[Tensor], Tensor]]:
    """Return the weights by aggregation alone, and the function `Weighing.entropy_on`."""
    o = objective
    aggregations = (o.aggregation, o.kl_aggregation, o.entropy_aggregation)
    normalizers = _normalizers(normalizer, o)
    # whichever aggregation takes no groups must not see any, but the policy's refuses stray ones
    strays = "prompt-mean" not in aggregations

    def weigh(on: Tensor, term: int) -> Tensor | None:
        aggregation = aggregations[term]
        if aggregation is None:
            return None
        grouped = aggregation == "prompt-mean" or (term == 0 and strays)
        return weights_of(
            on,
            sequences,
            packed=packed,
            cut=cut,
            aggregation=aggregation,
            normalizer=normalizers[term],
            length_norm=o.length_norm if aggregation == "seq-mean-token-sum-norm" else None,
            group_size=group_size if grouped else None,
            group_ids=group_ids if grouped else None,
            count_empty=o.count_empty and aggregation.startswith("seq-mean"),
            dtype=dtype,
        )

    policy = weigh(mask, 0)
    assert policy is not None
    kl = weigh(mask, 1) if o.kl_coef else None
    bonus = weigh(mask, 2) if o.entropy_coef else None

    def entropy_on(tokens: Tensor) -> Tensor:
        own = weigh(tokens, 2)
        return torch.where(tokens, policy, 0.0) if own is None else own

    return TermWeights(policy, kl, bonus), entropy_on


def _normalizers(normalizer: object, o: Objective) -> tuple[object, object, object]:
    """The global denominator of each term."""
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
