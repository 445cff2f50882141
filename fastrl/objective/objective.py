"""`Objective`: a policy loss as a surrogate, a level, a KL estimator and an aggregation.

The losses of the literature are combinations of these; `presets.py` lists them by name. The scalar
formulas are in `fastrl/reference/objectives.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import inf
from typing import Any, Literal, cast, get_args

from torch import Tensor

from fastrl.checks import around_zero, flag, number, one_of, positive
from fastrl.contract import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    KL_GRADIENTS,
    KL_LEVELS,
    LEVELS,
    SURROGATES,
    Aggregation,
    Coefficients,
    KlEstimator,
    KlGradient,
    KlLevel,
    Level,
    ObjectiveArguments,
    Surrogate,
)
from fastrl.objective.combinations import refuse_what_has_no_effect
from fastrl.objective.gamma_weights import GammaWeights
from fastrl.objective.presets import PRESETS, Convention, Preset, preset_fields
from fastrl.objective.rollout_correction import RolloutCorrection
from fastrl.objective.trust_region import TrustRegion

#: An estimate from the sampled token, or the exact divergence from the reference's distribution.
KlTerm = KlEstimator | Literal["exact"]
RolloutWeighs = Literal["policy-and-kl", "policy"]
#: (logprobs, old_logprobs, ref_logprobs, advantages) -> loss per token
TokenLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]

_NUMBERS = {
    **dict.fromkeys(("off_policy_threshold", "dual_clip", "delta", "entropy_coef"), number),
    **dict.fromkeys(("top_entropy_quantile", "kl_clamp", "length_norm"), positive),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), positive),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """A policy loss: the loss of a token, and how tokens are aggregated. `preset` names the papers.

    With `log r = logprobs - old_logprobs` (or its mean over the sequence) and the advantage `A`:

    | surrogate | loss of a token `f` | gradient `df/dlogprob` |
    | --- | --- | --- |
    | `ppo_clip` | `-min(min(r, delta) A, clip(r, 1-clip_low, 1+clip_high) A)`, for `A < 0` at most `-dual_clip A` | `-r A`, 0 where clipped |
    | `cispo` | `-sg[clip(r, 1-clip_low, 1+clip_high)] A logprob` | `-clip(r) A` |
    | `sapo` | `-4/tau sigmoid(tau (r - 1)) A`, `tau` by the sign of `A` | `-4 s (1-s) r A` |
    | `gmpo` | `-A exp(mean over the sequence of the clipped log r)`, bounds on `log r` | through unclipped tokens |
    | `reinforce` | `-A logprob` | `-A` |
    | a function | `function(logprobs, old_logprobs, ref_logprobs, advantages)` | by autograd |

    `sg` stops the gradient. `log r` is clamped to [-80, 80] to avoid overflow, and to
    `log_ratio_clamp` if given; outside the bounds the gradient is 0, and on a bound it is the
    gradient inside. If both log-probabilities are the same infinity (a token that both policies
    exclude), their difference is 0, so the ratio is 1 and the KL 0. If a token's log-probability is
    infinite, its gradient and its KL are 0, and its loss under `cispo` and `reinforce` is the
    infinite product, or 0 if the advantage is 0. A token of weight 0 contributes neither loss nor
    gradient, unless it is NaN. At the level `sequence-token` (GSPO-token), a token uses the value
    of the sequence's ratio, but only the gradient of its own log-probability:
    `log r = sg[mean] + logprob - sg[logprob]`.

    | kl_gradient | KL term of a token, with `k` from `kl_estimator` | its gradient |
    | --- | --- | --- |
    | `exact` | `k` | `dk/dlogprob` |
    | `straight-through` | `k` | the gradient of `k2`, which is unbiased (as verl's `k3+`) |
    | `bias-corrected` | `r k`, both log-ratios clamped to [-40, 40] | `r dk/dlogprob + k dr/dlogprob` (DeepSeek-V3.2) |

    Where `log r` or `k` is outside its bounds, the gradient of a `bias-corrected` KL is 0, because
    the gradient of only one factor could have the wrong sign. With the token's own ratio the
    gradient of `r k3`, `r (logprob - ref_logprob)`, is exact up to the distance 80.

    Attributes:
        surrogate: a row of the first table, or a function of per-token tensors.
        level: `"token"`, `"sequence"` for one ratio per sequence (GSPO), or `"sequence-token"`.
        clip_low: distance of the lower bound from 1 (`gmpo`: from 0, on the log ratio).
        clip_high: distance of the upper bound from 1 (`gmpo`: from 0, on the log ratio), or None.
        dual_clip: `c > 1`, which bounds the loss by `-c A` if `A < 0` (dual-clip PPO), or None.
        delta: upper bound of the unclipped ratio, above 1 + clip_high (INTELLECT-2), or None.
        sapo_temperature_pos: `tau` for positive advantages.
        sapo_temperature_neg: `tau` for all other advantages.
        kl_coef: weight `beta` of the KL to `ref_logprobs`, or None, with which the losses refuse
            them; 0 computes the metric `kl` alone. If it is 0, even at the end of a schedule, the
            other KL fields must be left at their defaults.
        kl_estimator: `k1`, `k2`, `k3` or `abs`, which `kl_divergence` defines; or `exact`, the
            KL(policy, reference) itself, with the reference's distributions passed as `teacher`.
        kl_clamp: bound on the absolute value of the estimate of a token in nats, or None.
        kl_gradient: `"exact"`, `"straight-through"` or `"bias-corrected"`, as in the table.
        kl_level: the ratio in a `bias-corrected` KL: `"token"`, the token's own ratio, with which
            the KL is unbiased, or `"policy"`, the ratio of the policy term, as in TRL and Liger.
        teacher_coef: weight of the divergence from a `Teacher`, which `aggregation` averages, too.
        entropy_coef: weight of the entropy bonus.
        log_ratio_clamp: bound on `|log r|`, or bounds (low, high) with `low <= log r <= high`, one
            of which may be infinite, or None.
        aggregation: how tokens are weighted: a row of the table in `token_weights`.
        kl_aggregation: how tokens are weighted in the KL term; None means by `aggregation`.
        entropy_aggregation: how tokens are weighted in the entropy bonus; None means by
            `aggregation`.
        length_norm: the constant of `seq-mean-token-sum-norm`, in tokens; None is the padded width
            T.
        count_empty: whether a mean over sequences counts sequences without an active token.
        rollout_correction: importance weights against `rollout_logprobs`: a `RolloutCorrection`, a
            tuple of several, or None.
        rollout_weighs: the terms that the rollout correction multiplies, `"policy-and-kl"` or
            `"policy"`.
        off_policy_threshold: drops tokens with negative advantage from the policy term if the mean
            of `old_logprobs - logprobs` over their sequence, in nats, is above this
            (DeepSeek-V3.2). `rollout_logprobs`, if given, replace `old_logprobs`; NaN differences
            count as 0. None disables it.
        top_entropy_quantile: the fraction of tokens that keep the policy term and the entropy
            bonus; these are the tokens with the highest entropy, and the others keep only the KL
            (arXiv 2506.01939). A token whose entropy is NaN keeps both.
        trust_region: drops tokens that have moved too far from the old policy (DPPO, M2PO), or
            None.
        gamma_weights: VESPO's weights of sequences, for `reinforce`, or None.
        score_centering: subtracts the score that is expected of the sampler (arXiv 2609.20807),
            which the losses compute from `rollout_top_k`; see `TopKLogprobs`.
        convention: the trainer whose preset this is. The values that its presets set for the KL,
            the entropy bonus or the rollout correction are accepted even while that term is off;
            other values raise.

    Raises:
        ValueError: a field is invalid, or has no effect in combination with the other fields.
        TypeError: a field has the wrong type.

    Examples:
        >>> from fastrl import Objective
        >>> Objective(clip_high=0.28, kl_coef=0.04).aggregation
        'token-mean'
        >>> Objective.preset("gspo", kl_coef=0.01).level
        'sequence'
    """  # noqa: E501

    surrogate: Surrogate | TokenLoss = "ppo_clip"
    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    kl_coef: float | None = None
    kl_estimator: KlTerm = "k3"
    kl_clamp: float | None = None
    kl_gradient: KlGradient = "exact"
    kl_level: KlLevel = "token"
    teacher_coef: float = 0.0
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
    trust_region: TrustRegion | None = None
    gamma_weights: GammaWeights | None = None
    score_centering: bool = False
    convention: Convention = "fastrl"

    def __post_init__(self) -> None:
        if isinstance(self.surrogate, type) or not callable(self.surrogate):
            one_of("surrogate", self.surrogate, SURROGATES)
        one_of("level", self.level, LEVELS)
        one_of("kl_estimator", self.kl_estimator, (*KL_ESTIMATORS, "exact"))
        one_of("kl_gradient", self.kl_gradient, KL_GRADIENTS)
        one_of("kl_level", self.kl_level, KL_LEVELS)
        one_of("aggregation", self.aggregation, AGGREGATIONS)
        for name in ("kl_aggregation", "entropy_aggregation"):
            if getattr(self, name) is not None:
                one_of(name, getattr(self, name), AGGREGATIONS)
        one_of("rollout_weighs", self.rollout_weighs, get_args(RolloutWeighs))
        one_of("convention", self.convention, get_args(Convention))
        flag("count_empty", self.count_empty)
        flag("score_centering", self.score_centering)

        keep = object.__setattr__  # NumPy numbers are stored as floats
        for field in dataclasses.fields(self):
            check, value = _NUMBERS.get(field.name), getattr(self, field.name)
            if check and not (value is None and field.default is None):
                keep(self, field.name, check(field.name, value))
        max_low = 1.0 if self.surrogate == "ppo_clip" else None
        keep(self, "clip_low", number("clip_low", self.clip_low, low=0.0, high=max_low))
        # the weight of cispo may be capped below 1, but not below its lower bound
        min_high = -self.clip_low if self.surrogate == "cispo" else 0.0
        if self.clip_high is not None:
            keep(self, "clip_high", number("clip_high", self.clip_high, low=min_high))
        if self.kl_coef is not None:
            keep(self, "kl_coef", number("kl_coef", self.kl_coef, low=0.0))
        keep(self, "teacher_coef", number("teacher_coef", self.teacher_coef, low=0.0))
        if self.log_ratio_clamp is not None:
            keep(self, "log_ratio_clamp", around_zero("log_ratio_clamp", self.log_ratio_clamp))

        if (quantile := self.top_entropy_quantile) > 1:
            raise ValueError(f"top_entropy_quantile must be at most 1, got {quantile}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual_clip}")
        highest = inf if self.clip_high is None else 1 + self.clip_high
        if self.delta is not None and self.delta <= highest:
            raise ValueError(f"delta must be above 1 + clip_high = {highest:g}, got {self.delta}")
        for name, kind in (("trust_region", TrustRegion), ("gamma_weights", GammaWeights)):
            value = getattr(self, name)
            if not (value is None or isinstance(value, kind)):
                given = type(value).__name__
                raise TypeError(f"{name} must be a {kind.__name__} or None, got {given}")
        for correction in self.rollout_corrections:
            if not isinstance(correction, RolloutCorrection):
                names, given = "a RolloutCorrection, a tuple of them or None", type(correction)
                raise TypeError(f"rollout_correction must be {names}, got {given.__name__}")
        if self.rollout_correction == ():
            raise ValueError("rollout_correction must contain at least one, or be None; got ()")
        refuse_what_has_no_effect(self)
        keep(self, "_arguments", self._as_arguments())

    @property
    def has_exact_kl(self) -> bool:
        """Whether the KL term is the divergence from a reference."""
        return self.kl_estimator == "exact" and bool(self.kl_coef)

    @property
    def sampler_weights(self) -> tuple[RolloutCorrection, ...]:
        """The rollout corrections whose weight is a function of the token's own ratio."""
        return tuple(c for c in self.rollout_corrections if c.level == "token")

    @property
    def arguments(self) -> ObjectiveArguments:
        """The arguments of the operators for this objective; a Python surrogate is left out."""
        return self._arguments  # type: ignore[attr-defined,no-any-return]

    def _as_arguments(self) -> ObjectiveArguments:
        clamp = self.log_ratio_clamp
        low, high = clamp if isinstance(clamp, tuple) else (-(clamp or inf), clamp or inf)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {"log_ratio_low": -low, "log_ratio_high": high}
        surrogate, estimator = self.surrogate, self.kl_estimator
        fields["kl_coef"] = self.kl_coef or 0.0
        if estimator == "exact":  # a separate term, which the operators do not compute
            estimator, fields["kl_coef"] = "k3", 0.0
        return ObjectiveArguments(
            surrogate=0 if callable(surrogate) else SURROGATES.index(surrogate),
            level=LEVELS.index(self.level),
            kl_estimator=KL_ESTIMATORS.index(estimator),
            kl_gradient=KL_GRADIENTS.index(self.kl_gradient),
            kl_level=KL_LEVELS.index(self.kl_level),
            coefficients=Coefficients._make(
                inf if fields[name] is None else float(fields[name])
                for name in Coefficients._fields
            ),
        )

    @property
    def rollout_corrections(self) -> tuple[RolloutCorrection, ...]:
        """The rollout corrections as a tuple, which is empty if there are none."""
        if self.rollout_correction is None:
            return ()
        is_tuple = isinstance(self.rollout_correction, tuple)
        return self.rollout_correction if is_tuple else (self.rollout_correction,)  # type: ignore[return-value]

    @classmethod
    def preset(
        cls, name: Preset, *, convention: Convention = "fastrl", **changes: Any
    ) -> Objective:
        """Return a loss of the literature by name, with `changes` to its fields.

        | name | definition | paper | name in other libraries |
        | --- | --- | --- | --- |
        | `ppo` | ppo_clip 0.2, token-mean | Schulman et al. 2017, arXiv 1707.06347 | verl `vanilla`, OpenRLHF `ppo` |
        | `grpo` | ppo_clip 0.2, seq-mean-token-mean | Shao et al. 2024, arXiv 2402.03300 | TRL `grpo` |
        | `bnpo` | ppo_clip 0.2, token-mean over the local batch | Xiao et al. 2025, arXiv 2506.02864 | TRL `bnpo` |
        | `dr_grpo` | ppo_clip 0.2, token sum over a constant length | Liu et al. 2025, arXiv 2503.20783 | TRL `dr_grpo`, verl `seq-mean-token-sum-norm` |
        | `dapo` | ppo_clip 0.2 / 0.28, token-mean (give `normalizer`) | Yu et al. 2025, arXiv 2503.14476 | TRL `dapo` |
        | `gspo` | sequence level, 3e-4 / 4e-4, seq-mean-token-mean | Zheng et al. 2025, arXiv 2507.18071 | TRL `importance_sampling_level="sequence"`, verl `gspo` |
        | `gmpo` | geometric mean of the ratios, each clipped at e^-0.4 or e^0.4, seq-mean-token-mean | Zhao et al. 2025, arXiv 2507.20673 | verl `geo_mean`, TRL `GMPOTrainer` |
        | `cispo` | cispo, ratio capped at 5, no lower bound, token-mean | MiniMax 2025, arXiv 2506.13585 | TRL `cispo` |
        | `sapo` | sapo 1.0 / 1.05, seq-mean-token-mean | Gao et al. 2025, arXiv 2511.20347 | TRL `sapo`, verl `sapo` |
        | `luspo` | gspo, each sequence weighted by its length | arXiv 2602.05261 | TRL `luspo` |
        | `reinforce` | reinforce, token-mean | Williams 1992 | tinker `importance_sampling` on policy |
        | `m2po` | `r A` in a trust region of mean squared log-ratio 0.04, token-mean | Zheng et al. 2025, arXiv 2510.01161 | AReaL `m2_threshold` |
        | `dppo_tv` | `r A` in a trust region of total variation 0.2, token-mean | arXiv 2602.04879 | verl `dppo_tv`, SkyRL `binary_tv` |
        | `dppo_kl` | `r A` in a trust region of KL 0.05, token-mean | arXiv 2602.04879 | verl `dppo_kl`, SkyRL `binary_kl` |
        | `vespo` | reinforce, sequences weighted by `GammaWeights`, token-mean | arXiv 2602.10693 | TRL `vespo`, Liger `vespo` |

        Trainers use the same name for different formulas; `convention` selects the formula and the
        defaults of one trainer.

        | | `fastrl` | `trl` (1.16) | `verl` (0.9) | `openrlhf` (0.11) |
        | --- | --- | --- | --- | --- |
        | bound on the log-ratio | 80 | 80 (TRL: none) | 20 | 20, `gspo` 80 |
        | ratio of `dppo_*` | through it, no cap | - | `cispo`, capped at 20 | - |
        | aggregation of `grpo` | sequence mean | sequence mean | token mean | token mean |
        | `dapo` upper clip | 0.28 | 0.2 | 0.28 | 0.28 |
        | dual clip | none | none | 3, always (not `gspo`, `cispo`) | none |
        | bounds on the ratio in `cispo` | [0, 5] | [0, 5] | [0.8, 1.2] | - |
        | `gspo` | one ratio per sequence | the same | GSPO-token, log-ratio at most 10 | as `fastrl` |
        | `luspo` | sum over the sequence, mean over sequences | the same, over all B | - | - |
        | empty sequences in a mean | left out | counted | left out, `gmpo` counted | left out |
        | KL of a token | k3 | ratio times k3 (`gmpo`: k3) | k3 within 10 | any, within 10 |
        | aggregation of KL and entropy | like the policy | entropy: token mean | token mean in `gspo sapo gmpo` | token mean |
        | rollout correction multiplies | policy and KL | policy | policy | policy |

        A convention cannot know the global counts of TRL and verl, `num_items_in_batch` and
        `batch_num_tokens` (pass `normalizer`), TRL's `max_completion_length` (pass `length_norm`),
        or verl's configuration (pass `clip_high` etc.).

        Args:
            name: one of the names above.
            convention: `fastrl` (the papers), `trl`, `verl` or `openrlhf`.
            **changes: fields of `Objective` that differ from the preset.

        Returns:
            The `Objective`.

        Raises:
            ValueError: the name or convention is unknown, the trainer does not have the loss, or
                a field has no effect.
            TypeError: a change is not a field of `Objective`.

        Examples:
            >>> from fastrl import Objective
            >>> Objective.preset("dapo").clip_high
            0.28
            >>> Objective.preset("ppo", convention="verl").dual_clip
            3.0
        """  # noqa: E501
        fields = preset_fields(name, convention, changes)
        return cls(**fields, convention=convention)


def as_objective(objective: object) -> Objective:
    """Return the `Objective` for a preset's name, a function or an `Objective`."""
    if isinstance(objective, Objective):
        return objective
    if isinstance(objective, str):
        named = _NAMED.get(objective)
        return Objective.preset(cast("Preset", objective)) if named is None else named
    if callable(objective) and not isinstance(objective, type):
        return Objective(surrogate=objective)
    raise TypeError(
        "objective must be an Objective, a preset's name or a function, "
        f"got {objective if isinstance(objective, type) else type(objective).__name__}"
    )


#: The presets of the papers, built and checked only once.
_NAMED = {name: Objective.preset(cast("Preset", name)) for name in PRESETS}
