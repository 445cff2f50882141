"""The inputs of a policy loss per token, besides logits: as tensors, and for the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from . import policy_data
from .arithmetic import Arithmetic
from .bounded import Bounded, Doubts
from .case import Case
from .objectives import fields_of, objective_of
from .oracle.policy import Loss, policy_loss
from .oracle.valid_tokens import Tokens as ValidTokens
from .own_objectives import OWN
from .tensors import bounds_tensor, flat_tensor, mask_tensor, token_tensor
from .tokens import Tokens
from .weighing import group_arguments, normalizer_argument, weights_of_terms


class PolicyInputs:
    """The numbers of every token besides logits, and how they are passed."""

    def __init__(self, case: Case, tokens: Tokens, valid: np.ndarray, logprobs: np.ndarray) -> None:
        self.case, self.tokens, self.valid = case, tokens, valid
        self.fields = fields_of(case)
        self.advantages = policy_data.advantages_of(case, tokens)
        self.policy_weights = policy_data.policy_weights_of(case, tokens)
        self.old = policy_data.old_of(case, logprobs, self.fields)
        self.ref = policy_data.ref_of(case, logprobs, self.fields)
        sampled = logprobs if self.old is None else self.old
        self.rollout = policy_data.rollout_of(case, sampled, self.fields)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that all policy losses share, as tensors."""
        case, tokens = self.case, self.tokens
        given: dict[str, Any] = {"objective": objective_of(case)}
        for name in ("old", "ref", "rollout"):
            values = getattr(self, name)
            if values is not None:
                given[f"{name}_logprobs"] = token_tensor(case, tokens, values, case.token_dtype)
        if self.policy_weights is not None:
            given["policy_weights"] = self._of_level(self.policy_weights, case.policy_weights)
        if case.normalizer is not None:
            given["normalizer"] = normalizer_argument(case)
        given |= group_arguments(case, tokens)
        if tokens.bounds is not None:
            given["cu_seqlens"] = bounds_tensor(case, tokens)
        return given

    def constants(self) -> list[Tensor]:
        """Return advantages and mask."""
        advantages = self._of_level(self.advantages, self.case.advantages)
        return [advantages, mask_tensor(self.case, self.tokens)]

    def _of_level(self, values: np.ndarray, level: str) -> Tensor:
        if level == "token":
            return token_tensor(self.case, self.tokens, values, self.case.token_dtype)
        return flat_tensor(self.case, values, self.case.token_dtype)

    def expected(
        self,
        logprobs: Bounded,
        entropy: Bounded | None,
        arithmetic: Arithmetic,
        doubts: Doubts,
    ) -> Loss:
        """Return the loss of log-probabilities and entropies of the valid tokens."""
        tokens, valid = self.tokens, self.valid

        def bounded(values: np.ndarray | None) -> Bounded | None:
            if values is None:
                return None
            return Bounded(policy_data.of_tokens(values, tokens)[valid], 0.0, arithmetic)

        inputs = ValidTokens(
            logprobs=logprobs,
            advantages=bounded(self.advantages),
            sequence=tokens.sequence[valid],
            count=tokens.count,
            old=bounded(self.old),
            ref=bounded(self.ref),
            rollout=bounded(self.rollout),
            entropy=entropy,
            policy_weights=bounded(self.policy_weights),
        )
        weights = weights_of_terms(self.case, tokens, valid, self.fields, arithmetic)
        own = OWN.get(self.case.objective)
        return policy_loss(inputs, self.fields, weights, doubts, own and own.oracle)
