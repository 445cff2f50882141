"""dL/dlogprob of some of the rows, from the objective as the registered operators take it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isinf
from typing import Any, cast

from torch import Tensor

from fastrl import reference
from fastrl.library import operators
from fastrl.objective import (
    KL_ESTIMATORS,
    KL_GRADIENTS,
    RATIOS,
    Objective,
    Ratio,
)
from fastrl.reference import Sequences


@dataclass(frozen=True)
class TokenSlopes:
    """An objective per token and its inputs `[N]`, in the order of the registered operators."""

    backend: str
    active: Tensor
    advantages: Tensor
    weights: Tensor
    kl_weights: Tensor | None
    entropy_weights: Tensor | None
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    ratio: int
    kl_estimator: int
    kl_gradient: int
    coefficients: list[float]

    def moves(self) -> Tensor:
        """Say which rows may have a gradient, as far as is known before their logprobs are."""
        kl_coef, entropy_coef = self.coefficients[6], self.coefficients[10]
        moves = (self.weights != 0) & (self.advantages != 0)
        for coefficient, weights in (
            (kl_coef, self.kl_weights),
            (entropy_coef, self.entropy_weights),
        ):
            if coefficient:
                moves = moves | ((self.weights if weights is None else weights) != 0)
        return moves

    def of(
        self, logprobs: Tensor, entropy: Tensor, rows: Tensor | slice
    ) -> tuple[Tensor, Tensor | None]:
        """Return the slopes of the loss in logprobs and entropy, both `[C]`, of these rows."""

        def of_rows(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows][None]

        advantages, mask = self.advantages[rows][None], self.active[rows][None]
        weights = self.weights[rows][None]
        kl_weights, entropy_weights = of_rows(self.kl_weights), of_rows(self.entropy_weights)
        old, ref = of_rows(self.old_logprobs), of_rows(self.ref_logprobs)
        if self.backend == "reference":
            _, slope, _ = reference.policy_loss(
                logprobs[None],
                advantages,
                mask,
                weights,
                Sequences(None, 1),
                self.objective,
                old_logprobs=old,
                ref_logprobs=ref,
                entropy=entropy[None],
                kl_weights=kl_weights,
                entropy_weights=entropy_weights,
            )
        else:
            _, slope, _ = operators(self.backend).policy_loss_fwd(
                logprobs[None],
                advantages,
                mask,
                weights,
                kl_weights,
                entropy_weights,
                old,
                ref,
                entropy[None],
                None,
                0,
                self.ratio,
                self.kl_estimator,
                self.kl_gradient,
                self.coefficients,
            )
        coefficient = self.coefficients[10]
        if not coefficient:
            return slope[0], None
        return slope[0], -coefficient * (weights if entropy_weights is None else entropy_weights)[0]

    @property
    def objective(self) -> Objective:
        """The objective per token that the numbers stand for."""
        low, high, dual, delta, pos, neg, kl_coef, kl_clamp, lowest, highest, entropy = (
            self.coefficients
        )
        of_kl: dict[str, Any] = {}
        if kl_coef:
            of_kl = {
                "kl_estimator": KL_ESTIMATORS[self.kl_estimator],
                "kl_gradient": KL_GRADIENTS[self.kl_gradient],
                "kl_clamp": None if isinf(kl_clamp) else kl_clamp,
            }

        def bound(value: float) -> float | None:
            return None if isinf(value) else value

        return Objective(
            ratio=cast("Ratio", RATIOS[self.ratio]),
            clip_low=low,
            clip_high=high,
            dual_clip=bound(dual),
            delta=bound(delta),
            sapo_temperature_pos=pos,
            sapo_temperature_neg=neg,
            kl_coef=kl_coef,
            **of_kl,
            log_ratio_clamp=None if isinf(lowest) and isinf(highest) else (-lowest, highest),
            entropy_coef=entropy,
        )
