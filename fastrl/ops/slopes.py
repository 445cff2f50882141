"""dL/dlogprob of some of the rows, from the objective as the registered operators take it."""

from __future__ import annotations

from collections.abc import Callable
from math import isinf
from typing import cast

from torch import Tensor

from fastrl import reference
from fastrl.library import operators
from fastrl.objective import KL_ESTIMATORS, RATIOS, KlEstimator, Objective, Ratio
from fastrl.reference import Sequences


def kernel_slopes(
    active: Tensor,
    advantages: Tensor,
    weights: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    ratio: int,
    kl_estimator: int,
    coefficients: list[float],
    *,
    backend: str,
) -> Callable[[Tensor, Tensor, Tensor | slice], tuple[Tensor, Tensor | None]]:
    """Return a function (logprobs, entropy, rows) -> slopes of both, for objectives per token.

    The per-token inputs are `[N]`; the function is given `[C]` of them and says which.
    """
    entropy_coef = coefficients[9]

    def slopes(
        logprobs: Tensor, entropy: Tensor, rows: Tensor | slice
    ) -> tuple[Tensor, Tensor | None]:
        chosen = weights[rows][None]
        old = None if old_logprobs is None else old_logprobs[rows][None]
        ref = None if ref_logprobs is None else ref_logprobs[rows][None]
        mask = active[rows][None]
        if backend == "reference":
            _, slope, _ = reference.policy_loss(
                logprobs[None],
                advantages[rows][None],
                mask,
                chosen,
                Sequences(None, 1),
                objective_of(ratio, kl_estimator, coefficients),
                old_logprobs=old,
                ref_logprobs=ref,
                entropy=entropy[None],
            )
        else:
            _, slope, _ = operators(backend).policy_loss_fwd(
                logprobs[None],
                advantages[rows][None],
                mask,
                chosen,
                old,
                ref,
                entropy[None],
                None,
                False,
                ratio,
                kl_estimator,
                coefficients,
            )
        return slope[0], -entropy_coef * chosen[0] if entropy_coef else None

    return slopes


def objective_of(ratio: int, kl_estimator: int, coefficients: list[float]) -> Objective:
    """Return the objective per token that the registered operators' arguments stand for."""
    clip_low, clip_high, dual_clip, delta, pos, neg, kl_coef, kl_clamp, clamp, entropy = (
        coefficients
    )

    def bound(value: float) -> float | None:
        return None if isinf(value) else value

    return Objective(
        ratio=cast("Ratio", RATIOS[ratio]),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=bound(dual_clip),
        delta=bound(delta),
        sapo_temperature_pos=pos,
        sapo_temperature_neg=neg,
        kl_coef=kl_coef,
        kl_estimator=cast("KlEstimator", KL_ESTIMATORS[kl_estimator]),
        kl_clamp=bound(kl_clamp),
        log_ratio_clamp=bound(clamp),
        entropy_coef=entropy,
    )
