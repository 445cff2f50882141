"""The loss family: an `Objective` picks a surrogate, a level, a KL estimator and an aggregation.

A loss of the literature is a choice from these lists; `presets.py` holds the named ones. The scalar
formulas are in `fastrl/reference/objectives.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import inf
from numbers import Real
from typing import Any, Literal, cast, get_args

from torch import Tensor

from fastrl.checks import flag, number, one_of, positive
from fastrl.contract import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    KL_GRADIENTS,
    LEVELS,
    SURROGATES,
    Aggregation,
    Coefficients,
    KlEstimator,
    KlGradient,
    Level,
    ObjectiveArguments,
    Surrogate,
)
from fastrl.objective.presets import PRESETS, Convention, Preset, preset_fields, values_of
from fastrl.objective.rollout_correction import RolloutCorrection

RolloutWeighs = Literal["policy-and-kl", "policy"]
#: (logprobs, old_logprobs, ref_logprobs, advantages) -> loss per token
TokenLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]

_NUMBERS = {
    **dict.fromkeys(("off_policy_threshold", "dual_clip", "delta", "entropy_coef"), number),
    **dict.fromkeys(("top_entropy_quantile", "kl_clamp", "length_norm"), positive),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), positive),
}
#: The surrogates that use a field, ...
_USED_BY = {
    **dict.fromkeys(("clip_low", "clip_high"), ("ppo_clip", "cispo", "gmpo")),
    **dict.fromkeys(("dual_clip", "delta"), ("ppo_clip",)),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), ("sapo",)),
    "log_ratio_clamp": ("ppo_clip", "cispo", "sapo", "gmpo"),
}
#: ... and the field without which another has no effect.
_NEEDS = {
    **dict.fromkeys(("kl_estimator", "kl_clamp", "kl_gradient", "kl_aggregation"), "kl_coef"),
    "entropy_aggregation": "entropy_coef",
    "rollout_weighs": "rollout_correction",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What the policy loss computes for a token, and how the tokens are added up.

    With `log r = logprobs - old_logprobs` (or its mean over the sequence) and `A` the advantage:

    | surrogate | loss of a token `f` | gradient `df/dlogprob` |
    | --- | --- | --- |
    | `ppo_clip` | `-min(min(r, delta) A, clip(r, 1-clip_low, 1+clip_high) A)`, for `A < 0` at most `-dual_clip A` | `-r A`, 0 where clipped |
    | `cispo` | `-sg[clip(r, 1-clip_low, 1+clip_high)] A logprob` | `-clip(r) A` |
    | `sapo` | `-4/tau sigmoid(tau (r - 1)) A`, `tau` by the sign of `A` | `-4 s (1-s) r A` |
    | `gmpo` | `-A exp(mean over the sequence of the clipped log r)`, bounds on `log r` | through unclipped tokens |
    | `reinforce` | `-A logprob` | `-A` |
    | a function | `function(logprobs, old_logprobs, ref_logprobs, advantages)` | by autograd |

    `|log r|` saturates at 80 (slope 0 beyond), so nothing overflows; `log_ratio_clamp` tightens it.
    Exactly on a bound the slope is that of the inside. Of two log-probabilities that are the same
    infinity (a token that both policies exclude) the difference is 0: ratio 1, KL 0. A token whose
    log-probability is infinite has the slope 0; its loss under `cispo` and `reinforce` is the
    infinite product, or 0 where the advantage is 0. A token of weight 0 adds neither loss nor
    slope, unless it is NaN.
    With the level `sequence-token` (GSPO-token) a token has the value of the sequence's ratio and
    the gradient of its own: `log r = sg[mean] + logprob - sg[logprob]`.

    | kl_gradient | KL term of a token, `k` by `kl_estimator` | its gradient |
    | --- | --- | --- |
    | `exact` | `k` | `dk/dlogprob` |
    | `straight-through` | `k` | that of `k2`, the unbiased one (as verl's `k3+`) |
    | `bias-corrected` | `r k`, both logs within 40 | `r dk/dlogprob + k dr/dlogprob` (DeepSeek-V3.2) |

    Attributes:
        surrogate: the row of the table, or a function of per-token tensors.
        level: `"token"`, `"sequence"` for one ratio per sequence (GSPO), or `"sequence-token"`.
        clip_low: distance of the lower bound from 1 (`gmpo`: from 0, on the log ratio).
        clip_high: distance of the upper bound from 1 (`gmpo`: from 0, on the log ratio).
        dual_clip: cap `c > 1` of the loss for negative advantages (dual-clip PPO), or None.
        delta: cap of the unclipped ratio, above 1 + clip_high (INTELLECT-2), or None.
        sapo_temperature_pos: `tau` for positive advantages.
        sapo_temperature_neg: `tau` for the others.
        kl_coef: weight `beta` of the KL to `ref_logprobs`. With 0 the other fields of the KL must
            be left out, also by a schedule that ends there.
        kl_estimator: `k1`, `k2`, `k3` or `abs`, as in `kl_divergence`.
        kl_clamp: bound of the estimate of a token, or None.
        kl_gradient: `"exact"`, `"straight-through"` or `"bias-corrected"`, as in the table.
        entropy_coef: weight of the entropy bonus.
        log_ratio_clamp: bound of `|log r|`, or (low, high) with `low <= log r <= high` and
            infinities for no bound, or None.
        aggregation: how tokens are weighed, as in `token_weights`.
        kl_aggregation: how the KL's tokens are weighed, or None: like the others.
        entropy_aggregation: how those of the entropy bonus are weighed, or None: like the others.
        length_norm: the constant length of `seq-mean-token-sum-norm`; None is the padded width T.
        count_empty: whether a mean over sequences counts those without a valid token.
        rollout_correction: importance weights against `rollout_logprobs`, one or a tuple, or None.
        rollout_weighs: the terms that they weigh, `"policy-and-kl"` or `"policy"`.
        off_policy_threshold: sequences whose mean of `old_logprobs - logprobs`
            (`rollout_logprobs`, where given, for the old ones) is above lose the policy term of
            their tokens with negative advantage (DeepSeek-V3.2), or None. A difference that is
            NaN counts as 0.
        top_entropy_quantile: the share of tokens, those of the highest entropy, that keep policy
            term and entropy bonus; the others keep the KL alone (arXiv 2506.01939). A token whose
            entropy is NaN keeps both.
        convention: whose preset this is. Fields that this trainer sets for the KL, the entropy bonus
            or the rollout correction are accepted while that term is off; others raise.

    Raises:
        ValueError: a field has no such value, or would have no effect beside the others.
        TypeError: a field has a wrong type.

    Example:
        >>> from fastrl import Objective
        >>> Objective(clip_high=0.28, kl_coef=0.04).aggregation
        'token-mean'
        >>> Objective.preset("gspo", kl_coef=0.01).level
        'sequence'
    """  # noqa: E501

    surrogate: Surrogate | TokenLoss = "ppo_clip"
    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_clamp: float | None = None
    kl_gradient: KlGradient = "exact"
    entropy_coef: float = 0.0
    log_ratio_clamp: float | tuple[float, float] | None = None
    aggregation: Aggregation = "token-mean"
    kl_aggregation: Aggregation | None = None
    entropy_aggregation: Aggregation | None = None
    length_norm: float | None = None
    count_empty: bool = False
    rollout_correction: RolloutCorrection | tuple[RolloutCorrection, ...] | None = None
    rollout_weighs: RolloutWeighs = "policy-and-kl"
    off_policy_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    convention: Convention = "fastrl"

    def __post_init__(self) -> None:
        if not callable(self.surrogate):
            one_of("surrogate", self.surrogate, SURROGATES)
        one_of("level", self.level, LEVELS)
        one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        one_of("kl_gradient", self.kl_gradient, KL_GRADIENTS)
        one_of("aggregation", self.aggregation, AGGREGATIONS)
        for name in ("kl_aggregation", "entropy_aggregation"):
            if getattr(self, name) is not None:
                one_of(name, getattr(self, name), AGGREGATIONS)
        one_of("rollout_weighs", self.rollout_weighs, get_args(RolloutWeighs))
        one_of("convention", self.convention, get_args(Convention))
        flag("count_empty", self.count_empty)

        keep = object.__setattr__  # numbers of numpy, too, are kept as floats
        for field in dataclasses.fields(self):
            check, value = _NUMBERS.get(field.name), getattr(self, field.name)
            if check and not (value is None and field.default is None):
                keep(self, field.name, check(field.name, value))
        farthest = 1.0 if self.surrogate == "ppo_clip" else None
        keep(self, "clip_low", number("clip_low", self.clip_low, low=0.0, high=farthest))
        # a weight may be capped below 1, and then only has to leave room above its lower bound
        nearest = -self.clip_low if self.surrogate == "cispo" else 0.0
        keep(self, "clip_high", number("clip_high", self.clip_high, low=nearest))
        keep(self, "kl_coef", number("kl_coef", self.kl_coef, low=0.0))
        keep(self, "log_ratio_clamp", _log_ratio_clamp(self.log_ratio_clamp))

        if self.top_entropy_quantile > 1:
            raise ValueError(
                f"top_entropy_quantile must be at most 1, got {self.top_entropy_quantile}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual_clip}")
        if self.delta is not None and self.delta <= 1 + self.clip_high:
            raise ValueError(
                f"delta must be above 1 + clip_high = {1 + self.clip_high:g}, got {self.delta}"
            )
        for correction in self.rollout_corrections:
            if not isinstance(correction, RolloutCorrection):
                raise TypeError(
                    "rollout_correction must be a RolloutCorrection, a tuple of them or None, "
                    f"got {type(correction).__name__}"
                )
        if self.rollout_correction == ():
            raise ValueError("rollout_correction must hold at least one, or be None; got ()")
        self._refuse_what_has_no_effect()
        keep(self, "_arguments", self._as_arguments())

    def _refuse_what_has_no_effect(self) -> None:
        surrogate = "a function" if callable(self.surrogate) else self.surrogate
        if surrogate == "gmpo" and self.level != "sequence":
            raise ValueError(f"level must be 'sequence' with surrogate gmpo, got {self.level!r}")
        if surrogate in ("a function", "reinforce") and self.level != "token":
            raise ValueError(
                f"level must be 'token' with surrogate {surrogate}, got {self.level!r}"
            )
        if surrogate == "gmpo" and self.kl_gradient == "bias-corrected":
            raise ValueError(
                "kl_gradient must not be 'bias-corrected' with surrogate gmpo: its ratio is no "
                "importance weight"
            )
        if surrogate == "gmpo" and self.top_entropy_quantile < 1:
            raise ValueError(
                "top_entropy_quantile must be 1 with surrogate gmpo, whose tokens share one ratio, "
                f"got {self.top_entropy_quantile}"
            )
        aggregations = (self.aggregation, self.kl_aggregation, self.entropy_aggregation)
        if self.length_norm is not None and "seq-mean-token-sum-norm" not in aggregations:
            raise ValueError(
                "length_norm has no effect with aggregation "
                f"{self.aggregation}; it is used by seq-mean-token-sum-norm"
            )
        if self.count_empty and not any(str(name).startswith("seq-mean") for name in aggregations):
            raise ValueError(
                f"count_empty has no effect with aggregation {self.aggregation}; "
                "it is used by the means over sequences"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            users, needed = _USED_BY.get(field.name), _NEEDS.get(field.name)
            if users and surrogate not in users:
                raise ValueError(
                    f"{field.name} has no effect with surrogate {surrogate}; "
                    f"it is used by {', '.join(users)}"
                )
            if needed is None or getattr(self, needed):
                continue
            # a trainer's own choice waits for the term that it is about
            if value not in values_of(self.convention, field.name):
                raise ValueError(
                    f"{field.name} has no effect without {needed}; got {field.name}={value!r} "
                    f"and {needed}={getattr(self, needed)}"
                )

    @property
    def arguments(self) -> ObjectiveArguments:
        """The objective as the operators take it, but for a function as surrogate."""
        return self._arguments  # type: ignore[attr-defined,no-any-return]

    def _as_arguments(self) -> ObjectiveArguments:
        clamp = self.log_ratio_clamp
        low, high = clamp if isinstance(clamp, tuple) else (-(clamp or inf), clamp or inf)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {"log_ratio_low": -low, "log_ratio_high": high}
        surrogate = self.surrogate
        return ObjectiveArguments(
            surrogate=0 if callable(surrogate) else SURROGATES.index(surrogate),
            level=LEVELS.index(self.level),
            kl_estimator=KL_ESTIMATORS.index(self.kl_estimator),
            kl_gradient=KL_GRADIENTS.index(self.kl_gradient),
            coefficients=Coefficients._make(
                inf if fields[name] is None else float(fields[name])
                for name in Coefficients._fields
            ),
        )

    @property
    def rollout_corrections(self) -> tuple[RolloutCorrection, ...]:
        """The rollout corrections, none or more."""
        if self.rollout_correction is None:
            return ()
        several = isinstance(self.rollout_correction, tuple)
        return self.rollout_correction if several else (self.rollout_correction,)  # type: ignore[return-value]

    @classmethod
    def preset(
        cls, name: Preset, *, convention: Convention = "fastrl", **changes: Any
    ) -> Objective:
        """Return a named loss of the literature, with fields changed as asked.

        | name | what it picks | paper | called elsewhere |
        | --- | --- | --- | --- |
        | `ppo` | ppo_clip 0.2, token-mean | Schulman et al. 2017, arXiv 1707.06347 | verl `vanilla`, OpenRLHF `ppo` |
        | `grpo` | ppo_clip 0.2, seq-mean-token-mean | Shao et al. 2024, arXiv 2402.03300 | TRL `grpo` |
        | `bnpo` | ppo_clip 0.2, token-mean over the local batch | Xiao et al. 2025, arXiv 2506.02864 | TRL `bnpo` |
        | `dr_grpo` | ppo_clip 0.2, sum over a constant length | Liu et al. 2025, arXiv 2503.20783 | TRL `dr_grpo`, verl `seq-mean-token-sum-norm` |
        | `dapo` | ppo_clip 0.2 / 0.28, token-mean (give `normalizer`) | Yu et al. 2025, arXiv 2503.14476 | TRL `dapo` |
        | `gspo` | sequence level, 3e-4 / 4e-4, seq-mean-token-mean | Zheng et al. 2025, arXiv 2507.18071 | TRL `importance_sampling_level="sequence"`, verl `gspo` |
        | `gmpo` | geometric mean of ratios within e^0.4, seq-mean-token-mean | Zhao et al. 2025, arXiv 2507.20673 | verl `geo_mean`, TRL `GMPOTrainer` |
        | `cispo` | cispo, ratio capped at 5, no lower bound, token-mean | MiniMax 2025, arXiv 2506.13585 | TRL `cispo` |
        | `sapo` | sapo 1.0 / 1.05, seq-mean-token-mean | Gao et al. 2025, arXiv 2511.20347 | TRL `sapo`, verl `sapo` |
        | `luspo` | gspo, each sequence times its length | arXiv 2602.05261 | TRL `luspo` |
        | `reinforce` | reinforce, token-mean | Williams 1992 | tinker `importance_sampling` on policy |

        One name is several formulas: `convention` picks that of a trainer, with its defaults.

        | | `fastrl` | `trl` (1.16) | `verl` (0.9) | `openrlhf` (0.11) |
        | --- | --- | --- | --- | --- |
        | log-ratio held within | 80 | 80 (TRL: nothing) | 20 | 20, `gspo` 80 |
        | `grpo` adds up by | sequence mean | sequence mean | token mean | token mean |
        | `dapo` upper clip | 0.28 | 0.2 | 0.28 | 0.28 |
        | dual clip | none | none | 3, always (not `gspo`, `cispo`) | none |
        | `cispo` holds the ratio in | [0, 5] | [0, 5] | [0.8, 1.2] | - |
        | `gspo` | one ratio per sequence | the same | GSPO-token, log-ratio at most 10 | as `fastrl` |
        | `luspo` | sum over the sequence, mean over sequences | the same, over all B | - | - |
        | empty sequences in a mean | left out | counted | left out, `gmpo` counted | left out |
        | KL of a token | k3, free | k3, free | k3 within 10 | any, within 10 |
        | KL and entropy add up | like the policy | entropy: token mean | token mean in `gspo sapo gmpo` | token mean |
        | rollout correction weighs | policy and KL | policy | policy | policy |

        What a convention cannot know is given with the call: `normalizer` for global counts (TRL's
        `num_items_in_batch`, verl's `batch_num_tokens`), `length_norm` for TRL's
        `max_completion_length`. verl's `clip_high` etc. follow its configuration: pass them.

        Args:
            name: one of the names above.
            convention: `fastrl` (the papers), `trl`, `verl` or `openrlhf`.
            **changes: fields of `Objective` that differ from the preset.

        Raises:
            ValueError: unknown name or convention, a loss that the trainer does not have, or a
                field without effect.
            TypeError: a change that is no field of `Objective`.

        Example:
            >>> from fastrl import Objective
            >>> Objective.preset("dapo").clip_high
            0.28
            >>> Objective.preset("ppo", convention="verl").dual_clip
            3.0
        """  # noqa: E501
        fields = preset_fields(name, convention, changes)
        return cls(**fields, convention=convention)


def _log_ratio_clamp(clamp: object) -> float | tuple[float, float] | None:
    if clamp is None:
        return None
    if not isinstance(clamp, tuple):
        return positive("log_ratio_clamp", clamp)
    if len(clamp) != 2 or any(isinstance(x, bool) or not isinstance(x, Real) for x in clamp):
        raise TypeError(f"log_ratio_clamp must be a number or a pair (low, high), got {clamp}")
    if not clamp[0] < 0 < clamp[1]:
        raise ValueError(f"log_ratio_clamp must be (low, high) with low < 0 < high, got {clamp}")
    return float(clamp[0]), float(clamp[1])


def as_objective(objective: object) -> Objective:
    """Return the `Objective` that a preset's name, a function or an `Objective` stands for."""
    if isinstance(objective, Objective):
        return objective
    if isinstance(objective, str):
        named = _NAMED.get(objective)
        return Objective.preset(cast("Preset", objective)) if named is None else named
    if callable(objective):
        return Objective(surrogate=objective)
    raise TypeError(
        "objective must be an Objective, a preset's name or a function, "
        f"got {type(objective).__name__}"
    )


#: The presets as the papers have them, built once: a call that names one need not check it again.
_NAMED = {name: Objective.preset(cast("Preset", name)) for name in PRESETS}
